"""Write the JSON Schemas of everything that is stored beside the models: ``python -m schemas.export``."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from schemas.graph import Prompt, SceneGraph
from schemas.job import JobConfig
from schemas.records import AdvantageMeta, EvaluateMeta, RolloutMeta, ScoreMeta

MODELS: dict[str, type[BaseModel]] = {
    "prompt": Prompt,
    "graph": SceneGraph,
    "job": JobConfig,
    "rollout": RolloutMeta,
    "score": ScoreMeta,
    "advantages": AdvantageMeta,
    "evaluate": EvaluateMeta,
}
FOLDER = Path(__file__).parent / "json"


def schema_text(model: type[BaseModel]) -> str:
    """Return the JSON Schema of a model as the text that is stored."""
    return json.dumps(model.model_json_schema(), indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write every schema to ``schemas/json``."""
    FOLDER.mkdir(exist_ok=True)
    for name, model in MODELS.items():
        (FOLDER / f"{name}.schema.json").write_text(schema_text(model))


if __name__ == "__main__":
    main()
