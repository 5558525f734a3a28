"""Workers that fail on purpose; module-level, so that spawned processes can import them."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from cast_engine.errors import UserError
from cast_engine.store import Sample
from schemas.graph import Prompt

SEEN = os.environ.get("CUDA_VISIBLE_DEVICES")
"""When this module was imported."""


def prompt_ids(n: int) -> list[str]:
    return [Prompt.of(f"prompt {i}").prompt_id for i in range(n)]


@dataclass
class FakeWorker:
    """Writes one prompt per key; what goes wrong is decided by files in a folder."""

    folder: Path
    fault: str = ""
    times: int = 1

    def run(self, shard):
        attempts = self.folder / f"{shard.shard_id}"
        count = int(attempts.read_text()) if attempts.exists() else 0
        attempts.write_text(str(count + 1))
        if shard.shard_id == 1 and count < self.times:
            self._fail()
        return [
            Sample(key, {"prompt.json": Prompt(prompt_id=key, text=key).model_dump_json().encode()}, {"prompt_id": key})
            for key in shard.keys
        ]

    def _fail(self):
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise":
            raise RuntimeError("cosmic ray")
        if self.fault == "user":
            raise UserError("no such model", where="model.path")
        if self.fault == "slow":
            time.sleep(60)


@dataclass
class SeesDevices:
    """Notes the devices that its process had when it imported this module."""

    folder: Path

    def run(self, shard):
        (self.folder / f"{shard.shard_id}").write_text(str(SEEN))
        return [Sample(key, {"prompt.json": b"{}"}, {"prompt_id": key}) for key in shard.keys]


@dataclass
class FailingSamples:
    """Every third sample fails."""

    def run(self, shard):
        out = []
        for i, key in enumerate(shard.keys):
            row = {"prompt_id": key}
            if i % 3 == 0:
                out.append(Sample(key, {}, row | {"status": "failed", "error_msg": "unreadable"}))
            else:
                text = Prompt(prompt_id=key, text=key).model_dump_json().encode()
                out.append(Sample(key, {"prompt.json": text}, row))
        return out
