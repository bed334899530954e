"""Train for one tenant in the store: a plain trainer with tail, backward pass and step.

The script runs as a process of its own. It builds its model, reports that it is ready, waits for a line,
trains one step on one training batch, and reports the loss and the seconds.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.harness.children import answers
from benchmarks.harness.measuring import confine
from benchmarks.server.networks import build
from upriver.engine.read import read_samples
from upriver.pipeline import Dataset
from upriver.pipeline.chain import stored_tensor
from upriver.program.freeze import frozen_units, keep_in_eval
from upriver.store import Store

LEARNING_RATE = 1e-4
"""Learning rate of plain SGD, which has no state of its own."""


class Trainer:
    """Train one step of a tenant.

    Args:
        spec: Its network, the store, the dataset, the samples of its training batch.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.model, _ = build(spec["network"])
        self.data = Dataset.open(Store.open(spec["uri"]), spec["dataset"])
        self.ids = spec["ids"]
        keep_in_eval(self.model, frozen_units(self.model))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)

    def step(self) -> float:
        """Read, decode, and run forward, backward and the step. Return the loss."""
        torch.manual_seed(0)  # the tail may contain dropout
        images = self._images()
        loss = nn.functional.cross_entropy(self.model(images), self.data.targets_of(list(self.ids)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _images(self) -> torch.Tensor:
        chain, rows = self.data.chain, []
        for blob, sample in zip(read_samples(self.data, self.ids), self.ids, strict=True):
            stored = stored_tensor(blob)
            rows.append(chain.run(stored, sample=sample, epoch=0, seed=0, start=chain.start, stop=0))
        return torch.stack(rows)


def main() -> None:
    """Build, wait, and train one step."""
    spec = json.loads(sys.argv[1])
    say = answers()
    torch.set_num_threads(1)
    if spec["data_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (spec["data_bytes"], spec["data_bytes"]))
    try:
        trainer = Trainer(spec)
        say({"ready": True})
        sys.stdin.readline()
        confine([spec["core"]])
        began, spent = time.perf_counter(), time.process_time()
        loss = trainer.step()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - spent
        say({"loss": loss, "seconds": seconds, "cpu_s": cpu_s})
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation this way
        say({"error": f"{type(error).__name__}: {error}"[:200]})


if __name__ == "__main__":
    main()
