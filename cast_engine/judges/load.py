"""From the job's ``score`` section to a judge."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from cast_engine.errors import UserError
from cast_engine.judges.base import Judge
from cast_engine.models.checkpoint import fingerprint
from cast_engine.tinyworld.bundle import resolve
from schemas.job import EvaluateConfig, ScoreConfig


def load_judge(config: ScoreConfig, section: str = "score") -> Judge:
    """Load the judge that ``config.judge`` names.

    ``hf`` loads ``config.model`` through transformers, ``exact`` is the tiny world's verifier, and
    ``package.module:Class`` is the user's own: called with the config, found on the import path or in the working
    folder. ``section`` is the job's section that messages name.

    Raises:
        UserError: there is no such judge, or the user's class is not one.
    """
    if config.judge == "exact":
        exact: Judge = _find("cast_engine.judges.exact_judge", "ExactJudge", f"{section}.judge = exact")()
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
    return _own(config, section)


def check_judge(config: ScoreConfig) -> None:
    """Refuse a judge that is not there (UserError as :func:`load_judge`), without loading its weights."""
    if config.judge == "hf":
        resolve(config.model)
    elif config.judge != "exact":
        _find_own(config, "score")


def same_judge(score: ScoreConfig, evaluate: EvaluateConfig) -> bool:
    """Whether one judge gives the reward and reports the gain: of one kind and, where it has weights, of one model.

    Folders of equal content are one model; in which dtype it runs and how its answers are read makes no other judge.
    """
    if score.judge != evaluate.judge:
        return False
    return score.judge == "exact" or score.model == evaluate.model or _content(score.model) == _content(evaluate.model)


def _content(model: str) -> str:
    """Return the fingerprint of a model's folder, or its name where there is no such folder (any more)."""
    try:
        return fingerprint([resolve(model)])
    except UserError:
        return model


def _find_own(config: ScoreConfig, section: str) -> Any:
    module_name, _, class_name = config.judge.partition(":")
    if not module_name or not class_name:
        raise UserError(
            f"no judge {config.judge!r}", where=f"{section}.judge", expected='"hf", "exact" or "package.module:Class"'
        )
    return _find(module_name, class_name, f"{section}.judge = {config.judge}")


def _own(config: ScoreConfig, section: str) -> Judge:
    made = _find_own(config, section)(config)
    missing = [name for name in ("name", "model_sha256") if not isinstance(getattr(made, name, None), str)]
    if not callable(getattr(made, "score", None)):
        missing.append("score")
    if missing:
        raise UserError(
            f"{config.judge} lacks {', '.join(missing)}",
            where=f"{section}.judge",
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
        raise UserError(f"no module {error.name!r}", where=where, do="install it or run where it lies") from error
    finally:
        sys.path.remove(here)
    found = getattr(module, class_name, None)
    if not callable(found):
        raise UserError(f"{module_name} has no class {class_name!r}", where=where)
    return found
