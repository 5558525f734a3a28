"""Names of the models that ship with the package, resolved to folders."""

from __future__ import annotations

from pathlib import Path

from cast_engine.errors import UserError

PREFIX = "tinyworld:"
NAMES = ("flux2", "judge")


def weights_dir() -> Path:
    """Return the folder that holds the shipped weights."""
    return Path(__file__).resolve().parent / "weights"


def is_bundled(name: str) -> bool:
    """Return whether ``name`` refers to a model that ships with the package, as ``tinyworld:flux2`` does."""
    return name.startswith(PREFIX)


def resolve(name: str | Path) -> Path:
    """Return the folder of a model: a shipped one by its ``tinyworld:`` name, any other by its path.

    Raises:
        UserError: if the name is not a shipped model, or the folder does not exist.
    """
    text = str(name)
    if not is_bundled(text):
        path = Path(name).expanduser()
        if not path.is_dir():
            raise UserError(f"no model folder {text!r}", expected="a folder or one of " + _shipped())
        return path
    short = text.removeprefix(PREFIX)
    if short not in NAMES:
        raise UserError(f"no shipped model {text!r}", expected="one of " + _shipped())
    path = weights_dir() / short
    if not path.is_dir():
        raise UserError(
            f"the weights of {text} are missing",
            where=str(path),
            do="reinstall the package, or train them: python -m cast_engine.tinyworld.training.all",
        )
    return path


def _shipped() -> str:
    return ", ".join(PREFIX + n for n in NAMES)
