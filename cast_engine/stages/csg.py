"""Stage `csg`: from each prompt to its causal scene graph, by the deterministic grammar."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cast_engine.errors import UserError
from cast_engine.graphs.grammar import parse
from cast_engine.run.pool import WorkerSpec
from cast_engine.store import Dataset, Reader, Sample, ShardPlan
from schemas.graph import Atom, Prompt, SceneGraph
from schemas.records import Status


@dataclass
class GraphWorker:
    """Parses prompts; one that cannot be read is a failed sample, never the end of the job."""

    prompts: Path
    _reader: Reader | None = field(default=None, repr=False)

    def run(self, shard: ShardPlan) -> list[Sample]:
        """Return the graphs of the shard's prompts."""
        self._reader = self._reader or Dataset.open(self.prompts).reader()
        return [self._graph(key, self._reader) for key in shard.keys]

    def _graph(self, key: str, reader: Reader) -> Sample:
        prompt = Prompt.model_validate_json(reader.read(key)["prompt.json"])
        row: dict[str, Any] = {"prompt_id": key, "parent_key": key}
        try:
            graph = parse(prompt.text)
        except UserError as error:
            failed = {"status": Status.FAILED, "error_class": "UserError", "error_msg": str(error)}
            return Sample(key, {}, row | failed)
        graph = graph.model_copy(update={"prompt_id": key})
        row |= {"source": graph.source, "atom_kinds": [a.kind for a in graph.atoms]}
        return Sample(key, {"graph.json": graph.model_dump_json().encode()}, row)


def plan(path: Path, prompts: Dataset) -> tuple[Dataset, WorkerSpec]:
    """Plan the dataset of graphs: one per prompt, in the same shards."""
    dataset = Dataset.create(
        path,
        stage="csg",
        config={"source": "grammar"},
        shards=[s.keys for s in prompts.plan],
        parents=[prompts.as_parent(path)],
    )
    return dataset, WorkerSpec(GraphWorker, {"prompts": prompts.path})


def load(dataset: Dataset) -> dict[str, SceneGraph]:
    """Read the graphs that could be made, by prompt id, in plan order."""
    reader = dataset.reader()
    return {k: SceneGraph.model_validate_json(reader.read(k)["graph.json"]) for k in reader.keys()}  # noqa: SIM118


def as_tree(graph: SceneGraph) -> str:
    """Return the graph as an indented tree: objects, what hangs on them, then what joins them."""
    lines = [graph.prompt]
    for node in graph.nodes:
        lines.append(f"  {node.id}: {node.plural if (node.count or 1) > 1 else node.noun}")
        lines += [f"    {_line(a)}" for a in graph.atoms if a.nodes == (node.id,)]
    for edge in graph.edges:
        lines.append(f"  {edge.subject} {edge.predicate} {edge.object}")
        lines += [f"    {_line(a)}" for a in graph.atoms if a.edge == edge.id]
    return "\n".join(lines)


def _line(atom: Atom) -> str:
    needs = f"  (needs {', '.join(atom.parents)})" if atom.parents else ""
    return f"{atom.kind:<9} {atom.question} -> {atom.expected}{needs}"
