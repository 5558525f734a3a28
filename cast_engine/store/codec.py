"""Tensors, images and JSON as bytes; everything about foreign bytes is checked before anything is allocated."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cast_engine.errors import DatasetError
from schemas.records import TensorField

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LIMIT = 1 << 20
"""Largest safetensors header, bytes."""
JSON_LIMIT = 16 << 20
"""Largest JSON member, bytes."""
PIXEL_LIMIT = 64 << 20
"""Largest image, pixels."""

_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2), "I64": ("int64", 8)}
_DIM = re.compile(r"^([A-Za-z_]+)(?:\+(\d+))?$")
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name is used twice")
    return out


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def encode_json(value: Any) -> bytes:
    """Return UTF-8 JSON with sorted keys; NaN and infinity are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()


def decode_json(data: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DatasetError: Too large, not JSON, NaN or infinity in it, a name used twice, or not an object.
    """
    if len(data) > JSON_LIMIT:
        raise DatasetError(f"a JSON member of {len(data)} bytes", expected=f"at most {JSON_LIMIT}")
    try:
        value = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as err:
        raise DatasetError(f"not a JSON member: {err}") from err
    if not isinstance(value, dict):
        raise DatasetError(f"a JSON {type(value).__name__}", expected="an object")
    return value


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the length of its data."""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else -1
    if not 0 < length <= min(HEADER_LIMIT, len(data) - 8):
        raise DatasetError(f"a safetensors header of {length} bytes in {len(data)}", expected="a whole small header")
    header = decode_json(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, len(data) - 8 - length


def _bind(name: str, shape: list[int], pattern: tuple[str, ...], symbols: dict[str, int]) -> None:
    if len(shape) != len(pattern):
        raise DatasetError(f"tensor {name} has shape {shape}", expected=f"{list(pattern)}")
    for size, dim in zip(shape, pattern, strict=True):
        match = _DIM.match(dim)
        assert match, f"bad dimension in schema: {dim}"
        value = size - int(match[2] or 0)
        if value < 0 or symbols.setdefault(match[1], value) != value:
            raise DatasetError(
                f"tensor {name} has shape {shape}, so {match[1]} = {value}",
                expected=f"{list(pattern)} with {match[1]} = {symbols.get(match[1])} as in the tensors before",
            )


def check_tensors(data: bytes, fields: dict[str, TensorField]) -> dict[str, int]:
    """Check a safetensors member against its schema from the header alone, allocating nothing.

    Args:
        data: The whole member.
        fields: Exactly the tensors that must be there.

    Returns:
        The value of each symbol (``P``, ``C``, ...).

    Raises:
        DatasetError: Wrong names, dtypes or shapes; offsets that overlap, leave holes or do not fit the data.
    """
    header, size = _header(data)
    if set(header) != set(fields):
        raise DatasetError(f"tensors {sorted(header)}", expected=f"{sorted(fields)}")
    symbols: dict[str, int] = {}
    spans = []
    for name, field in fields.items():
        entry = header[name]
        try:
            shape, (begin, end) = list(entry["shape"]), entry["data_offsets"]
            dtype, width = _DTYPES[entry["dtype"]]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError) as err:
            raise DatasetError(f"tensor {name}: a malformed entry in the safetensors header") from err
        if dtype not in field.dtypes:
            raise DatasetError(f"tensor {name} is {dtype}", expected=" or ".join(field.dtypes))
        if not whole or end - begin != math.prod(shape) * width:
            raise DatasetError(f"tensor {name}: shape {shape} does not fit its bytes {begin}..{end}")
        _bind(name, shape, field.shape, symbols)
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise DatasetError("tensors overlap or leave a hole in a safetensors member")
        at = end
    if at != size:
        raise DatasetError(f"{size} bytes of tensors", expected=f"{at} by the header")
    return symbols


def encode_tensors(tensors: dict[str, Tensor]) -> bytes:
    """Return tensors as safetensors bytes (same tensors, same bytes)."""
    from safetensors.torch import save

    # cloned: safetensors refuses views that share their storage, such as the last of the window's latents
    data: bytes = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return data


def decode_tensors(data: bytes, fields: dict[str, TensorField]) -> dict[str, Tensor]:
    """Read a safetensors member; see :func:`check_tensors` for what is refused."""
    check_tensors(data, fields)
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(data)
    except SafetensorError as err:
        raise DatasetError(f"not a safetensors member: {err}") from err
    return {name: tensors[name] for name in fields}


def encode_png(image: npt.NDArray[np.uint8]) -> bytes:
    """Return an ``[H, W, 3]`` uint8 image as PNG."""
    from PIL import Image

    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"expected uint8 [H, W, 3], got {image.dtype} {list(image.shape)}")
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(out, "PNG", compress_level=6)
    return out.getvalue()


def png_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) from the header of an 8-bit RGB PNG.

    Raises:
        DatasetError: Another kind of file, one that was cut, or more than ``PIXEL_LIMIT`` pixels.
    """
    if not data.startswith(_PNG) or not data.endswith(_PNG_END):
        raise DatasetError("an image that is not PNG, or not all of it")
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    if (depth, colour) != (8, 2):
        raise DatasetError(f"a PNG of bit depth {depth}, colour type {colour}", expected="8-bit RGB")
    if not 0 < width * height <= PIXEL_LIMIT:
        raise DatasetError(f"a PNG of {width} x {height}", expected=f"at most {PIXEL_LIMIT} pixels")
    return height, width


def decode_png(data: bytes, height: int | None = None, width: int | None = None) -> npt.NDArray[np.uint8]:
    """Read an 8-bit RGB PNG as ``[H, W, 3]`` uint8; its size is checked before decoding, also against what is given.

    Raises:
        DatasetError: Not such a PNG, of another size, too large, or damaged.
    """
    from PIL import Image

    size = png_size(data)
    if (height or size[0], width or size[1]) != size:
        raise DatasetError(f"a PNG of height {size[0]}, width {size[1]}", expected=f"{height}, {width}")
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            return np.array(image.convert("RGB"), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as err:
        raise DatasetError(f"a damaged PNG: {err}") from err
