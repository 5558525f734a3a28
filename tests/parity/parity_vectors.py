"""Vectors produced by other projects' code. They are not part of the repository: the tests are skipped without them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch


def parity_folder() -> Path | None:
    """The folder `parity` under CAST_SHARED, or under a `shared` beside the repository or above it."""
    if os.environ.get("CAST_SHARED"):
        folder = Path(os.environ["CAST_SHARED"]) / "parity"
        return folder if folder.is_dir() else None
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "parity").is_dir():
            return parent / "shared" / "parity"
    return None


def cases(name: str, *formulas: str, **inputs: object) -> list:
    """Parametrised cases of one file with these formulas and inputs; a single skipped one if the file is absent."""
    folder = parity_folder()
    if folder is None or not (folder / name).is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no shared/parity/{name} beside the repository"))]
    found = [c for c in json.loads((folder / name).read_text())["cases"] if c["formula"] in formulas]
    found = [c for c in found if all(c["inputs"].get(key) == value for key, value in inputs.items())]
    assert found, f"{name} has no case of {formulas}"
    return [pytest.param(c, id=c["id"]) for c in found]


def tensor(case: dict, part: str, name: str) -> torch.Tensor:
    dtype = {"float32": torch.float32, "float64": torch.float64}[case["dtype"]]
    return torch.tensor(case[part][name], dtype=dtype)
