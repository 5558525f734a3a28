"""The import direction of docs/architecture: who may know whom."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = {"schemas", "cast_engine.errors", "cast_engine.jobfile"}
LOW = BASE | {"cast_engine.numerics", "cast_engine.store"}
MIDDLE = LOW | {
    "cast_engine.tinyworld",
    "cast_engine.graphs",
    "cast_engine.models",
    "cast_engine.judges",
    "cast_engine.run",
}
ALLOWED = {
    "schemas": {"schemas"},
    "cast_engine/errors.py": {"schemas"},
    "cast_engine/jobfile.py": BASE,
    "cast_engine/numerics": LOW,
    "cast_engine/store": LOW,
    "cast_engine/tinyworld/training": MIDDLE,
    "cast_engine/tinyworld": MIDDLE,
    "cast_engine/graphs": MIDDLE,
    "cast_engine/models": MIDDLE,
    "cast_engine/judges": MIDDLE,
    "cast_engine/run": MIDDLE,
    "cast_engine/stages": MIDDLE,
    "cast_engine/pipeline.py": MIDDLE | {"cast_engine.stages", "trainer"},
    "cast_engine/cli.py": MIDDLE | {"cast_engine.stages", "cast_engine.pipeline"},
    "cast_engine/__main__.py": {"cast_engine.cli"},
    "trainer": LOW | {"cast_engine.models", "cast_engine.tinyworld", "trainer"},
    "cast_engine/__init__.py": BASE,
}
ONLY_IN = {"diffusers": ("cast_engine/models", "cast_engine/tinyworld"), "vllm": ("cast_engine/judges/vllm_judge.py",)}
HEAVY = {"torch", "diffusers", "transformers", "polars", "matplotlib", "pyarrow", "peft", "accelerate"}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names if a.name.islower()}
    return found


def sources() -> list[tuple[Path, str]]:
    files = [p for top in ("schemas", "cast_engine", "trainer") for p in sorted((ROOT / top).rglob("*.py"))]
    assert len(files) > 100, "a rule that no file is held to proves nothing"
    return [(p, p.relative_to(ROOT).as_posix()) for p in files]


def owner(relative: str) -> str:
    matches = [prefix for prefix in ALLOWED if relative == prefix or relative.startswith(prefix + "/")]
    assert matches, f"{relative}: no rule says what it may import"
    return max(matches, key=len)


def test_import_direction():
    ours = ("schemas", "cast_engine", "trainer")
    for path, relative in sources():
        rule = ALLOWED[owner(relative)]
        for name in imports(path):
            if name.split(".")[0] not in ours:
                continue
            known = [r for r in rule if name == r or name.startswith(r + ".") or r.startswith(name + ".")]
            assert known, f"{relative} imports {name}, which its layer may not know"


def test_no_stage_imports_another_stage():
    for path, relative in sources():
        if not relative.startswith("cast_engine/stages/"):
            continue
        for name in imports(path):
            assert not name.startswith("cast_engine.stages."), f"{relative} imports {name}"


def test_engines_stay_behind_their_wrappers():
    for path, relative in sources():
        for name in imports(path):
            places = ONLY_IN.get(name.split(".")[0])
            assert places is None or relative.startswith(places), f"{relative} imports {name}"


def test_only_the_command_line_knows_the_pipeline():
    for path, relative in sources():
        if relative != "cast_engine/cli.py":
            assert "cast_engine.pipeline" not in imports(path), f"{relative} imports the pipeline"


def test_the_pipeline_loads_stages_when_it_comes_to_them():
    found = imports(ROOT / "cast_engine/pipeline.py", top_level_only=True)
    late = ("cast_engine.stages", "cast_engine.models", "cast_engine.judges", "trainer")
    assert not [name for name in found if name.startswith(late) or name.split(".")[0] in HEAVY]


def test_command_line_modules_import_nothing_heavy():
    for relative in ("cast_engine/cli.py", "trainer/cli.py", "cast_engine/errors.py", "cast_engine/jobfile.py"):
        heavy = {n.split(".")[0] for n in imports(ROOT / relative, top_level_only=True)} & HEAVY
        assert not heavy, f"{relative} imports {heavy} at import time"


def test_schemas_know_no_torch():
    for path, relative in sources():
        if relative.startswith("schemas/"):
            assert not {n.split(".")[0] for n in imports(path)} & {"torch", "diffusers", "transformers"}, relative
