"""Prompt embeds on disk, one file per prompt and encoder: written once, read when needed, never all in memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cast_engine.errors import DatasetError, UserError
from cast_engine.store import atomic

if TYPE_CHECKING:
    from cast_engine.models.base import ImageModel, PromptEmbeds
    from schemas.graph import Prompt

KEPT_BYTES = 2**30
"""Embeds that stay in memory; one prompt of FLUX.2 takes 16 MB."""


class EmbedCache:
    """Embeds by (prompt id, encoder fingerprint): ``<folder>/<encoder[:16]>/<prompt id>.safetensors``.

    Several processes may fill one cache: a file appears whole or not at all, and equal inputs give equal bytes.
    """

    def __init__(self, folder: Path, encoder_sha256: str) -> None:
        self.folder = folder / encoder_sha256[:16]
        self.encoder_sha256 = encoder_sha256

    def path(self, prompt_id: str) -> Path:
        """Return the file of a prompt."""
        return self.folder / f"{prompt_id}.safetensors"

    def missing(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return the prompts without an embed, once each, in order."""
        unique = {p.prompt_id: p for p in prompts}
        return [p for p in unique.values() if not self.path(p.prompt_id).is_file()]

    def put(self, prompt_id: str, embeds: PromptEmbeds) -> None:
        """Write the embeds of a prompt unless they are there."""
        from safetensors.torch import save

        atomic.make_dir(self.folder)
        data = save({k: v.detach().cpu().contiguous() for k, v in embeds.items()}, {"encoder": self.encoder_sha256})
        atomic.create_once(self.path(prompt_id), data)

    def get(self, prompt_id: str) -> PromptEmbeds:
        """Read the embeds of a prompt.

        Raises:
            DatasetError: There are none, they are damaged, or another encoder made them.
        """
        from safetensors import SafetensorError, safe_open

        path = self.path(prompt_id)
        try:
            with safe_open(path, framework="pt") as f:
                encoder = (f.metadata() or {}).get("encoder")
                embeds = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as exc:
            found = "no such embed" if not path.is_file() else f"not readable ({exc})"
            raise DatasetError(
                found, where=str(path), do="delete it if it is there, and run `cast-engine embed`"
            ) from exc
        if encoder != self.encoder_sha256 or not embeds:
            raise DatasetError(f"made by encoder {encoder}", where=str(path), expected=self.encoder_sha256)
        return cast("PromptEmbeds", embeds)

    def sha256(self, prompt_id: str) -> str:
        """Return the sha256 of a prompt's file, which samples record."""
        try:
            with self.path(prompt_id).open("rb") as f:
                return hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as exc:
            raise DatasetError("no such embed", where=str(self.path(prompt_id)), do="run `cast-engine embed`") from exc


class RecentEmbeds:
    """The embeds that were read last, up to a number of bytes; the one just read stays whatever its size."""

    def __init__(self, cache: EmbedCache, limit: int = KEPT_BYTES) -> None:
        self.cache, self.limit, self.bytes = cache, limit, 0
        self._kept: OrderedDict[str, PromptEmbeds] = OrderedDict()

    def get(self, prompt_id: str) -> PromptEmbeds:
        """Return the embeds of a prompt, from memory or as :meth:`EmbedCache.get` does."""
        if prompt_id not in self._kept:
            self._kept[prompt_id] = self.cache.get(prompt_id)
            self.bytes += _size(self._kept[prompt_id])
        self._kept.move_to_end(prompt_id)
        while self.bytes > self.limit and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= _size(oldest)
        return self._kept[prompt_id]


def _size(embeds: PromptEmbeds) -> int:
    return sum(t.nbytes for t in embeds.values())


def fill(
    model: ImageModel,
    cache: EmbedCache,
    prompts: Sequence[Prompt],
    advance: Callable[[int], None] = lambda _: None,
) -> int:
    """Encode the prompts that have no embed yet; return how many.

    The text encoder is loaded only if there are any, and is gone again on return. One prompt is in memory at a time,
    and a killed run goes on where it stopped. ``advance`` is told of every prompt that is done.

    Raises:
        UserError: A prompt is too long for the encoder; it is named.
    """
    if cache.encoder_sha256 != model.info.encoder_sha256:
        raise UserError("the cache belongs to another text encoder", where=str(cache.folder), do="use another folder")
    todo = cache.missing(prompts)
    if not todo:
        return 0
    model.load_text_encoder()
    try:
        for prompt in todo:
            cache.put(prompt.prompt_id, model.encode([prompt.text])[0])
            advance(1)
    finally:
        model.free_text_encoder()
    return len(todo)
