"""`make` installs what the tests passed with: every dependency has its pin."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_is_pinned_to_a_version_that_pyproject_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][^+\s]*)", line).groups()
            assert canonicalize_name(name) not in pins
            pins[canonicalize_name(name)] = version
    assert list(pins) == sorted(pins)
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        needed = Requirement(text)
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), text
