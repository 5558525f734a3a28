"""Pictures for the report: small data URIs, and maps laid over an image."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Grid = npt.NDArray[np.float64]

LARGEST = 320
"""Longer side of an embedded picture, pixels."""
PLAIN = 128
"""A picture up to this size is kept pixel by pixel as PNG."""
MAP_COLOURS, WEIGHT_COLOURS = "viridis", "RdBu"  # both can be told apart with any colour vision
MAP_SHARE, WEIGHT_SHARE = 0.62, 0.75  # of the map's colour over the grey picture


def data_uri(image: Pixels) -> str:
    """Return a picture for the page: PNG if small, else scaled to ``LARGEST`` and JPEG."""
    from PIL import Image

    picture, out = Image.fromarray(np.ascontiguousarray(image)), io.BytesIO()
    if max(picture.size) <= PLAIN:
        picture.save(out, "PNG", compress_level=9)
        return _uri("png", out.getvalue())
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    picture.save(out, "JPEG", quality=86)
    return _uri("jpeg", out.getvalue())


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def overlay(image: Pixels, values: Grid, *, low: float, high: float, signed: bool) -> Pixels:
    """Return the picture in grey with a map in colour over it.

    Args:
        image: ``[H, W, 3]``.
        values: ``[h, w]`` on the latent grid; cells are shown as they are, without smoothing.
        low: value of the scale's lower end.
        high: value of its upper end.
        signed: use the diverging scale, for values around 0.
    """
    from matplotlib import colormaps
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image))
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    grey = np.asarray(picture.convert("L"), dtype=np.float64)[..., None] / 255.0
    grey = 0.15 + 0.85 * grey
    place = np.clip((values - low) / max(high - low, 1e-12), 0.0, 1.0)
    name, share = (WEIGHT_COLOURS, WEIGHT_SHARE) if signed else (MAP_COLOURS, MAP_SHARE)
    colour = np.asarray(colormaps[name](place))[..., :3]
    rows = np.arange(grey.shape[0]) * values.shape[0] // grey.shape[0]
    columns = np.arange(grey.shape[1]) * values.shape[1] // grey.shape[1]
    mixed = (1 - share) * grey + share * colour[rows][:, columns]
    out: Pixels = np.round(255 * mixed).astype(np.uint8)
    return out


def scale_colours(*, signed: bool, stops: int = 9) -> list[str]:
    """Return hex colours along a scale, for the legend beside the pictures (as over white)."""
    from matplotlib import colormaps

    name, share = (WEIGHT_COLOURS, WEIGHT_SHARE) if signed else (MAP_COLOURS, MAP_SHARE)
    colour = np.asarray(colormaps[name](np.linspace(0, 1, stops)))[:, :3]
    mixed = np.round(255 * ((1 - share) * 0.9 + share * colour)).astype(int)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in mixed]


def cell_centre(values: Grid, index: int) -> tuple[float, float]:
    """Return the centre of a cell as percent of the picture's (width, height)."""
    row, column = divmod(index, values.shape[1])
    return 100 * (column + 0.5) / values.shape[1], 100 * (row + 0.5) / values.shape[0]
