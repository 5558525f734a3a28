"""Where everything of a run lies. The folder listing is the data flow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunLayout:
    """Paths of a run folder.

    ::

        run.json               the job as it was started, with its hash
        prompts/<split>/       dataset: one prompt per sample          split: train, evaluate
        graphs/<split>/        dataset: one causal scene graph per prompt
        embeds/                text embeddings, one safetensors file per prompt
        rounds/0000/rollout/   dataset: images, window latents, log-probs
        rounds/0000/score/     dataset: atom scores, attention maps
        rounds/0000/advantages/  dataset: the signed weight W
        rounds/0000/train/     checkpoint: adapter, optimiser, state
        evaluate/<name>/       dataset: held-out images and verdicts
        timings.jsonl          seconds per stage, one line for each time it ran
        stopped.json           why a guard ended the training, until its round is trained
        summary.json           before and after
        report.html
    """

    root: Path

    @property
    def run_file(self) -> Path:
        """The job as it was started."""
        return self.root / "run.json"

    @property
    def embeds(self) -> Path:
        """Folder of text embeddings."""
        return self.root / "embeds"

    @property
    def timings(self) -> Path:
        """Seconds per stage."""
        return self.root / "timings.jsonl"

    @property
    def stopped(self) -> Path:
        """Why a guard ended the training."""
        return self.root / "stopped.json"

    @property
    def summary(self) -> Path:
        """Before and after, as JSON."""
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.root / "report.html"

    def prompts(self, split: str) -> Path:
        """Dataset of prompts of a split."""
        return self.root / "prompts" / split

    def graphs(self, split: str) -> Path:
        """Dataset of scene graphs of a split."""
        return self.root / "graphs" / split

    def round(self, index: int, stage: str) -> Path:
        """Dataset (or checkpoint) of a stage of one round."""
        return self.root / "rounds" / f"{index:04d}" / stage

    def evaluate(self, name: str) -> Path:
        """Dataset of one held-out evaluation."""
        return self.root / "evaluate" / name
