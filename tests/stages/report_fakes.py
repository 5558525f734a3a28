"""A run folder as a job would leave it, without any model: scenes of the tiny world drawn with known mistakes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from cast_engine.graphs.grammar import parse
from cast_engine.numerics.credit import signed_weight
from cast_engine.numerics.credit_stats import atom_mass, mean_by_place
from cast_engine.numerics.maps import prepare, resample
from cast_engine.run.console import record_timing
from cast_engine.run.layout import RunLayout
from cast_engine.run.runfile import open_run
from cast_engine.store import Dataset, Sample, encode_json, encode_png, encode_tensors
from cast_engine.tinyworld.prompts import spec_of, split
from cast_engine.tinyworld.render import render
from cast_engine.tinyworld.scenes import COLOURS, RELATIONS, sample
from cast_engine.tinyworld.verify import drawn_pixels
from schemas.graph import SceneGraph
from schemas.job import JobConfig
from schemas.records import AdvantageMeta, EvaluateMeta, RolloutMeta, ScoreMeta, sample_key

NUMBERS = ("zero", "one", "two", "three", "four", "five")
GRID = (8, 8)
CHANNELS = 2


def small_job(**sections) -> JobConfig:
    body = {
        "rounds": 3,
        "rollout": {"prompts_per_round": 2, "group_size": 4},
        "prompts": {"evaluate_count": 10},
        "train": {"updates_per_round": 2},
        "evaluate": {"every": 2},
        "report": {"images": 6, "maps": 4},
    }
    return JobConfig.model_validate(body | sections)


def mistaken(rng, spec, skill):
    """The specification with mistakes (a group may be gone: None), and whether the relation is right."""
    while True:
        groups = [_mistaken_group(rng, g, skill) for g in spec.groups]
        if len(groups) == 2 and rng.random() > skill:
            groups[int(rng.integers(2))] = None
        relation_ok = rng.random() < skill - 0.15 and None not in groups
        relation = spec.relation if None not in groups else None
        if relation and not relation_ok:
            relation = str(rng.choice([r for r in RELATIONS if r != relation]))
        try:
            return replace(spec, groups=tuple(g for g in groups if g), relation=relation), groups, relation_ok
        except ValueError:
            continue


def _mistaken_group(rng, group, skill):
    count, colour = group.count, group.colour
    if rng.random() > skill - 0.25:
        count += 1 if count == 1 or (count < 4 and rng.random() < 0.5) else -1
    if colour and rng.random() > skill:
        colour = str(rng.choice([c for c in COLOURS if c != colour]))
    return replace(group, count=count, colour=colour)


def draw(rng, prompt: str, graph: SceneGraph, skill: float) -> SimpleNamespace:
    """An image, its verdicts, answers, counts and attention maps."""
    spec = spec_of(prompt)
    drawn, groups, relation_ok = mistaken(rng, spec, skill)
    scene = sample(rng, drawn)
    rows, columns = np.mgrid[0 : GRID[0], 0 : GRID[1]] * 8.0 + 4.0
    blobs = [0.02 + 0.01 * rng.random(GRID) for _ in spec.groups]
    places = [i for i, g in enumerate(groups) if g]
    for o in scene.objects:
        blobs[places[o.group]] += np.exp(-((rows - o.y) ** 2 + (columns - o.x) ** 2) / 90.0)
    scores, answers, counted, maps = [], [], [], []
    for atom in graph.atoms:
        nodes = [int(n[1:]) for n in atom.nodes]
        asked, found = spec.groups[nodes[0]], groups[nodes[0]]
        count = found.count if found else 0
        ok = {
            "object": bool(found),
            "count": count == asked.count,
            "attribute": bool(found) and found.colour == asked.colour,
        }.get(atom.kind, relation_ok)
        scores.append(float(ok))
        counted.append(count if atom.kind == "count" else None)
        answers.append(NUMBERS[count] if atom.kind == "count" else "Yes" if ok else "No")
        field = sum(blobs[p] for p in nodes)
        maps.append(field / field.mean())
    return SimpleNamespace(
        image=render(scene), scores=scores, answers=answers, counted=counted, maps=np.stack(maps).astype(np.float16)
    )


def make_run(root, job=None, *, rounds=None, evaluations=None, hostile=False, train=True):
    """Write a run folder.

    Args:
        root: where.
        job: the job, `small_job()` by default.
        rounds: rounds that were trained; fewer than the job's make an unfinished run.
        evaluations: names of the evaluations that were made.
        hostile: put markup into the prompts and questions.
        train: write checkpoints of the rounds.
    """
    job = job or small_job()
    layout = RunLayout(root)
    rounds = job.rounds if rounds is None else rounds
    open_run(layout.run_file, job)
    graphs = {
        name: write_graphs(layout.graphs(name), split(source, n, 1), hostile)
        for name, source, n in (("train", "train", 24), ("evaluate", "test", job.prompts.evaluate_count or 10))
    }
    if evaluations is None:
        every = job.evaluate.every or job.rounds
        after = [r for r in range(1, rounds + 1) if r % every == 0 or r == job.rounds]
        evaluations = ["base", "base-double-steps", *(f"round-{r:04d}" for r in after)]
    for name in evaluations:
        done = int(name[6:]) / job.rounds if name.startswith("round") else 0.0
        write_evaluation(layout.evaluate(name), graphs["evaluate"], 0.78 + 0.1 * done)
    update = 0
    for round_ in range(rounds):
        write_round(layout, job, graphs["train"], round_)
        if train:
            update = write_checkpoint(layout, job, round_, update)
    record_timing(layout.timings, stage="rollout", round_=None, seconds=12.5, samples=24)
    record_timing(layout.timings, stage="score", round_=None, seconds=8.25, samples=24)
    return layout, job


def write_graphs(path, prompts, hostile=False) -> dict[str, tuple[str, SceneGraph]]:
    out = {}
    for prompt in prompts:
        graph = parse(prompt)
        if hostile:
            atoms = [a.model_copy(update={"question": a.question + ' <img src=x onerror="x()">'}) for a in graph.atoms]
            text = f"{prompt} <script>alert(\"x\")</script> & 'quoted'"
            graph = graph.model_copy(update={"prompt": text, "atoms": tuple(atoms)})
        out[graph.prompt_id] = (prompt, graph)
    ds = Dataset.create(path, stage="csg", config={"source": "grammar"}, shards=[list(out)])
    rows = [Sample(k, {"graph.json": g.model_dump_json().encode()}, {"prompt_id": k}) for k, (_, g) in out.items()]
    ds.commit(0, rows)
    ds.seal()
    return out


def write_evaluation(path, graphs, skill, *, fail=0, seal=True) -> Dataset:
    keys = [sample_key(p, 0, 0) for p in graphs]
    config = {"skill": skill, "num_steps": 12, "adapter_sha256": f"adapter of {path.name}"}
    ds = Dataset.create(path, stage="evaluate", config=config, shards=[keys])
    samples = []
    for i, (key, (prompt, graph)) in enumerate(zip(keys, graphs.values(), strict=True)):
        row = {"prompt_id": graph.prompt_id, "round": 0, "seed": i}
        if i < fail:
            samples.append(Sample(key, {}, row | {"status": "nonfinite", "error_msg": "no finite answer"}))
            continue
        other = int(1000 * skill) if i % 3 == 0 else 0  # a third of the prompts changes at random
        seen = draw(np.random.default_rng([i, other]), prompt, graph, skill)
        meta = EvaluateMeta(
            key=key,
            prompt_id=graph.prompt_id,
            prompt=graph.prompt,
            member=0,
            seed=i,
            atom_ids=tuple(a.id for a in graph.atoms),
            kinds=tuple(a.kind for a in graph.atoms),
            scores=tuple(seen.scores),
            counted=tuple(seen.counted),
            expected=tuple(a.expected for a in graph.atoms),
        )
        row |= {"atom_kinds": list(meta.kinds), "atom_scores": seen.scores, "counted": seen.counted, "num_steps": 12}
        row["reward"] = float(np.mean(seen.scores))
        members = {"image.png": encode_png(seen.image), "meta.json": encode_json(meta.model_dump())}
        samples.append(Sample(key, members, row))
    ds.commit(0, samples)
    if seal:
        ds.seal()
    return ds


def write_round(layout, job, graphs, round_) -> None:
    chosen = list(graphs)[round_ % 4 :: 4][: job.rollout.prompts_per_round]
    members = range(job.rollout.group_size)
    shards = [[sample_key(p, round_, m) for m in members] for p in chosen]
    skill = 0.78 + 0.1 * round_ / job.rounds
    parts = {s: [] for s in ("rollout", "score", "advantages")}
    for prompt_id in chosen:
        prompt, graph = graphs[prompt_id]
        seen = [draw(np.random.default_rng([job.seed, round_, m]), prompt, graph, skill) for m in members]
        group = _group(job, graph, round_, seen)
        for stage, samples in group.items():
            parts[stage].append(samples)
    configs = {"rollout": {"num_steps": 12}, "score": {"judge": "fake"}, "advantages": {"grid": list(GRID)}}
    for stage, groups in parts.items():
        config = configs[stage] | {"model_sha256": "ab" * 32, "round": round_}
        ds = Dataset.create(layout.round(round_, stage), stage=stage, config=config, shards=shards)
        for i, samples in enumerate(groups):
            ds.commit(i, samples)
        ds.seal()


def _group(job, graph, round_, seen) -> dict[str, list[Sample]]:
    keys = [sample_key(graph.prompt_id, round_, m) for m in range(len(seen))]
    scores = torch.tensor([s.scores for s in seen], dtype=torch.float64)
    noise = torch.from_numpy(np.random.default_rng(round_).uniform(0, 0.05, tuple(scores.shape)))
    scores = (scores * 0.9 + noise).clamp(0, 1)
    neutral = torch.ones(GRID, dtype=torch.float16)
    config = job.advantages
    maps = [
        prepare(torch.from_numpy(s.maps), GRID, neutral=neutral, blurred=config.blur, share=config.map_blend).maps
        for s in seen
    ]
    credit = signed_weight(config.credit, scores, torch.stack(maps), positions=GRID[0] * GRID[1], keys=keys)
    out = {"rollout": [], "score": [], "advantages": []}
    for i, (key, one) in enumerate(zip(keys, seen, strict=True)):
        row = {"prompt_id": graph.prompt_id, "round": round_}
        out["rollout"].append(_rollout(key, graph, round_, i, one.image, row))
        atoms = {
            "atom_ids": tuple(a.id for a in graph.atoms),
            "kinds": tuple(str(a.kind) for a in graph.atoms),
            "questions": tuple(a.question for a in graph.atoms),
            "expected": tuple(a.expected for a in graph.atoms),
        }
        meta = ScoreMeta(
            key=key, prompt_id=graph.prompt_id, judge="fake", model_sha256="", mode="", answers=one.answers, **atoms
        )
        tensors = {
            "scores": scores[i].float(),
            "maps": torch.from_numpy(one.maps),
            "mass": torch.full((len(one.scores),), 0.5),
            "neutral": neutral,
        }
        more = {"atom_kinds": list(meta.kinds), "atom_scores": scores[i].tolist(), "reward": float(scores[i].mean())}
        members = {"score.safetensors": encode_tensors(tensors), "meta.json": encode_json(meta.model_dump())}
        out["score"].append(Sample(key, members, row | more))
        meta = AdvantageMeta(
            key=key, prompt_id=graph.prompt_id, credit=config.credit, atom_ids=atoms["atom_ids"], scale=credit.scale
        )
        tensors = {"weight": credit.weight[i], "advantage": credit.advantage[i].float()}
        members = {"advantage.safetensors": encode_tensors(tensors), "meta.json": encode_json(meta.model_dump())}
        out["advantages"].append(Sample(key, members, row | {"credit": config.credit} | _figures(credit, i, one)))
    return out


def _figures(credit, i, one) -> dict:
    """What the manifest says of an image's weight."""
    place = mean_by_place(credit.weight[i], resample(torch.from_numpy(drawn_pixels([one.image])), GRID).flatten())
    out = {"group_std": credit.std, "above_clip_share": 0.0, "drawn_share": place.share}
    out |= {"weight_drawn": place.drawn, "weight_background": place.background}
    if credit.advantage.shape[1] > 1:
        mass = atom_mass(credit.advantage, credit.low_std)
        out |= {"mass": float(mass.all[i]), "low_std_mass": float(mass.low_std[i])}
    return out


def _rollout(key, graph, round_, member, image, row) -> Sample:
    meta = RolloutMeta(
        key=key,
        prompt_id=graph.prompt_id,
        prompt=graph.prompt,
        round=round_,
        member=member,
        seed=member,
        initial_seed=member,
        guidance=1.0,
        height=64,
        width=64,
        num_steps=12,
        dynamics="flow_sde",
        noise_level=0.7,
        window_start=1,
        window_length=3,
        adapter_sha256="",
        model_sha256="ab" * 32,
        embed_sha256="",
    )
    positions, window = GRID[0] * GRID[1], 3
    tensors = {
        "latents": torch.zeros(window + 1, positions, CHANNELS),
        "final_latent": torch.zeros(positions, CHANNELS),
        "steps": torch.arange(1, window + 1),
        "sigmas": torch.linspace(1, 0, 13),
        "logp_old": torch.zeros(window, positions),
    }
    members = {
        "rollout.safetensors": encode_tensors(tensors),
        "image.png": encode_png(image),
        "meta.json": encode_json(meta.model_dump()),
    }
    return Sample(key, members, row | {"member": member, "height": 64, "width": 64})


def write_checkpoint(layout, job, round_, update) -> int:
    folder = layout.round(round_, "train")
    folder.mkdir(parents=True, exist_ok=True)
    rng, rows = np.random.default_rng(round_), []
    for k in range(job.train.updates_per_round):
        update += 1
        rows.append(
            {
                "round": round_,
                "update": update,
                "round_update": k + 1,
                "log_ratio_mean": 1e-7 * k,
                "log_ratio_max": 6e-7 + 4e-6 * k * float(rng.uniform(0.8, 1.2)),
                "position_log_ratio_max": 5e-6 + 6e-5 * k,
                "outside_share": 0.002 * k,
                "clip_share_positive": 0.002 * k,
                "clip_share_negative": 0.003 * k * float(rng.uniform(0.5, 1.5)),
                "weight_mean": float(rng.normal(0, 0.01)),
                "weight_std": 0.8 - 0.1 * round_ / job.rounds + float(rng.normal(0, 0.02)),
                "learning_rate": 3e-4,
                "grad_norm": None if update == 2 else float(rng.uniform(0.2, 0.6)),
                "adapter_norm": 3.0 + 0.02 * update,
                "adapter_ratio": 0.0004 * update,
                "seconds": 0.4,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    state = {"round": round_, "update": update, "adapter_sha256": "cd" * 32}
    state["start_ratio"] = {"image": 6e-7, "position": 5e-6}
    (folder / "state.json").write_text(json.dumps(state))
    return update
