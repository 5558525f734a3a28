"""From the job's ``score`` section to a judge."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from cast_engine.errors import UserError
from cast_engine.judges.base import Judge
from cast_engine.tinyworld.bundle import resolve
from schemas.job import ScoreConfig


def load_judge(config: ScoreConfig) -> Judge:
    """Load the judge that ``config.judge`` names.

    ``hf`` loads ``config.model`` through transformers, ``exact`` is the tiny world's verifier, and
    ``package.module:Class`` is the user's own: called with the config, found on the import path or in the working
    folder.

    Raises:
        UserError: there is no such judge, or the user's class is not one.
    """
    if config.judge == "exact":
        exact: Judge = _find("cast_engine.judges.exact_judge", "ExactJudge", "exact")()
        return exact
    if config.judge == "hf":
        from cast_engine.judges.hf_judge import HFJudge

        return HFJudge(
            resolve(config.model),
            dtype=config.dtype,
            device=config.device,
            mode=config.mode,
            rows=config.rows,
            layers=config.layers,
            batch_size=config.batch_size,
        )
    return _own(config)


def check_judge(config: ScoreConfig) -> None:
    """Refuse a judge that is not there (UserError as :func:`load_judge`), without loading its weights."""
    if config.judge == "hf":
        resolve(config.model)
    elif config.judge != "exact":
        _find_own(config)


def _find_own(config: ScoreConfig) -> Any:
    module_name, _, class_name = config.judge.partition(":")
    if not module_name or not class_name:
        raise UserError(
            f"no judge {config.judge!r}", where="score.judge", expected='"hf", "exact" or "package.module:Class"'
        )
    return _find(module_name, class_name, config.judge)


def _own(config: ScoreConfig) -> Judge:
    made = _find_own(config)(config)
    missing = [name for name in ("name", "model_sha256") if not isinstance(getattr(made, name, None), str)]
    if not callable(getattr(made, "score", None)):
        missing.append("score")
    if missing:
        raise UserError(
            f"{config.judge} lacks {', '.join(missing)}",
            where="score.judge",
            expected="name: str, model_sha256: str and score(images, graphs) -> list[AtomScores]",
            do="see cast_engine/judges/base.py",
        )
    judge: Judge = made
    return judge


def _find(module_name: str, class_name: str, where: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)  # a console script does not look in the working folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"no module {error.name!r}", where=f"score.judge = {where}", do="install it or run where it lies"
        ) from error
    finally:
        sys.path.remove(here)
    found = getattr(module, class_name, None)
    if not callable(found):
        raise UserError(f"{module_name} has no class {class_name!r}", where=f"score.judge = {where}")
    return found
