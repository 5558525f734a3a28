"""Stage `prompts`: read prompts from a file or from a split of the tiny world, and give each its id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cast_engine.errors import UserError
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset, Sample, ShardPlan
from schemas.graph import Prompt

SHARD_PROMPTS = 512
SPLIT_SEED = 0
"""Splits do not depend on the run's seed: two runs are compared on the same held-out prompts."""


def read_prompts(source: str, count: int | None) -> list[Prompt]:
    """Read prompts.

    Args:
        source: ``tinyworld:train|validation|test``, a ``.txt`` file (one prompt a line) or a ``.jsonl`` file (one
            object with a ``prompt`` field a line).
        count: use the first ``count``; needed for ``tinyworld:``.

    Returns:
        Distinct prompts in input order.

    Raises:
        UserError: nothing to read, a malformed line, or fewer prompts than asked for.
    """
    if source.startswith("tinyworld:"):
        if count is None:
            raise UserError(
                "no count", where=f"prompts {source}", expected="how many to draw", do="set prompts.*_count"
            )
        from cast_engine.tinyworld.prompts import split

        texts = split(source.partition(":")[2], count, SPLIT_SEED)
    else:
        texts = _read_file(Path(source))
    prompts = list({p.prompt_id: p for p in map(Prompt.of, texts)}.values())
    if count is not None and len(prompts) < count:
        raise UserError(
            f"{len(prompts)} distinct prompts", where=source, expected=f"at least {count}", do="lower prompts.*_count"
        )
    return prompts[:count]


def check_disjoint(train: Sequence[Prompt], evaluate: Sequence[Prompt]) -> None:
    """Refuse evaluation prompts that are trained on (UserError names the first)."""
    shared = {p.prompt_id for p in train} & {p.prompt_id for p in evaluate}
    if shared:
        first = next(p for p in evaluate if p.prompt_id in shared)
        raise UserError(
            f"{len(shared)} evaluation prompts are training prompts too, first {first.text!r}",
            where="prompts.evaluate",
            expected="held-out prompts",
            do="remove them from one of the files",
        )


def _read_file(path: Path) -> list[str]:
    if path.exists() and not path.is_file():
        raise UserError("not a file", where=str(path), expected="a .txt or .jsonl file of prompts")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # with or without a byte order mark
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), expected="a .txt or .jsonl file of prompts") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), expected="a UTF-8 text file") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            text = _prompt_field(path, number, line) if path.suffix == ".jsonl" else line.strip()
            texts.append(_checked(path, number, text))
    if not texts:
        raise UserError("no prompts in it", where=str(path), expected="one prompt a line")
    return texts


def _prompt_field(path: Path, number: int, line: str) -> str:
    where = f"{path}:{number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg})", where=where, expected='{"prompt": "..."} on every line') from error
    except RecursionError:
        raise UserError("JSON too deep", where=where, expected='{"prompt": "..."} on every line') from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or not value["prompt"].strip():
        raise UserError("no prompt in it", where=where, expected='{"prompt": "..."} on every line')
    return str(value["prompt"])


def _checked(path: Path, number: int, text: str) -> str:
    limit = 4096
    if len(text) > limit or not text.isprintable():
        found = f"{len(text)} characters" if len(text) > limit else "control characters"
        raise UserError(found, where=f"{path}:{number}", expected=f"a printable line of at most {limit} characters")
    return text


@dataclass
class PromptWorker:
    """Writes prompts down."""

    texts: dict[str, str]  # by prompt id

    def run(self, shard: ShardPlan) -> list[Sample]:
        """Return the shard's prompts as they are stored."""
        out = []
        for key in shard.keys:
            prompt = Prompt(prompt_id=key, text=self.texts[key])
            row = {"prompt_id": key, "prompt": prompt.text}
            out.append(Sample(key, {"prompt.json": prompt.model_dump_json().encode()}, row))
        return out


def plan(path: Path, source: str, prompts: Sequence[Prompt]) -> tuple[Dataset, WorkerSpec]:
    """Plan the dataset of prompts; its config names the source, its plan the prompts themselves."""
    ids = [p.prompt_id for p in prompts]
    shards = [ids[i : i + SHARD_PROMPTS] for i in range(0, len(ids), SHARD_PROMPTS)]
    dataset = Dataset.create(path, stage="prompts", config={"source": source, "count": len(ids)}, shards=shards)
    return dataset, WorkerSpec(PromptWorker, {"texts": {p.prompt_id: p.text for p in prompts}})


def load(dataset: Dataset) -> dict[str, Prompt]:
    """Read a sealed dataset of prompts, in plan order."""
    reader = dataset.reader()
    return {key: Prompt.model_validate_json(reader.read(key)["prompt.json"]) for key in reader.keys()}  # noqa: SIM118
