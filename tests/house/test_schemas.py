"""Exported JSON Schemas are those of the models."""

import pytest

from schemas.export import FOLDER, MODELS, schema_text


@pytest.mark.parametrize("name", sorted(MODELS))
def test_exported_schema_is_current(name):
    assert (FOLDER / f"{name}.schema.json").read_text() == schema_text(MODELS[name]), "run `make schemas`"
