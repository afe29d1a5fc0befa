"""Clips per second of TSM and I3D, forward and in a training step, beside their multiply-adds.

Lin et al. 2019 state that TSM trains at 1.8 times the throughput of I3D on GPUs of 2019. Here one CPU thread runs the
same models on small frames, in rounds in which the models take turns; the rate is per second of CPU time, which other
load hardly changes. A CPU has no launch overhead and other kernels, so the ratio on a GPU may differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

from bench.common.harness import Record, options
from bench.common.rounds import in_turn, ratios

SCHEMA: Final = "fastvid-bench-model-speed/1"
PAPER_TIMES: Final = 1.8
CLASSES: Final = 400
MODELS: Final[Mapping[str, int]] = {"tsm-r50": 8, "i3d-r50": 32, "i3d-r50-3x1x1": 32}
"""Frames of each model."""


add_arguments = options(
    "rounds", json="model_speed.json", side=(112, "height and width in pixels"), batch=(2, "clips per step")
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    import torch

    from fastvid.models import zoo
    from fastvid.models.zoo import model_cost

    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {name: zoo.build(name, CLASSES, frames) for name, frames in MODELS.items()}
    video = {name: torch.randn(args.batch, 3, frames, args.side, args.side) for name, frames in MODELS.items()}
    label = torch.arange(args.batch)
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9) for name, model in models.items()}

    def forward(name: str) -> None:
        with torch.no_grad():
            models[name].eval()(video[name])

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        torch.nn.functional.cross_entropy(models[name].train()(video[name]), label).backward()
        optimizers[name].step()

    record = Record(SCHEMA, args, "side", "batch", "rounds", threads=1, paper_times=PAPER_TIMES, rows=[])
    for kind, work in (("forward", forward), ("training step", step)):
        spent = _spent(work, args.rounds)
        for name, frames in MODELS.items():
            cost = model_cost(models[name], (1, 3, frames, args.side, args.side))
            times = ratios(spent[name], spent["tsm-r50"])
            record["rows"].append({
                "model": name, "frames": frames, "kind": kind, "parameters": cost.parameters, "gmacs": cost.macs / 1e9,
                "clips_per_cpu_s": args.batch / statistics.median(spent[name]),
                "times_slower_than_tsm": statistics.median(times), "low": min(times), "high": max(times),
            })  # fmt: skip
    return record.finish()


def _spent(work: Callable[[str], None], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each round of each model; a first round is not counted."""

    def once(name: str, _: int) -> float:
        began = time.process_time()
        work(name)
        return time.process_time() - began

    return in_turn(tuple(MODELS), rounds, once, warm_up=1)
