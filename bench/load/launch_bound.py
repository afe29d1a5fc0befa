"""Measure how much loading slows down a thread that launches many small operations, as a GPU model's step does."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final

from bench.load.pipelines import Batches, PipelineInputs, decoder_alone, fastvid_loader

KINDS: Final = ("elsewhere", "thread", "process")

_OPERATIONS: Final = 400  # per step
# Rounds are short because the speed of a shared machine changes within seconds; a batch takes 0.1 s to make.
_STEPS: Final = 120
_TAKEN: Final = 3
_IDLE_SECONDS: Final = 0.6
_START_SECONDS: Final = 5.0


def slowdown(inputs: PipelineInputs, kind: str, rounds: int) -> dict[str, float]:
    """Measure the relative increase of a launch-bound thread's step time while fastvid loads on the other cores.

    Returns step times in milliseconds, and increases as fractions of the step time without loading.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    own = replace(inputs, workers=max(1, inputs.workers - 1))
    process = context.Process(target=_launch, args=(theirs, own, kind, rounds))
    process.start()
    theirs.close()
    kept, loaded, means = ours.recv()
    process.join()
    rises = [after / before for before, after in zip(kept, loaded, strict=True)]
    return {
        "step_ms_kept": 1e3 * statistics.median(kept),
        "step_ms_loaded": 1e3 * statistics.median(loaded),
        "rise": statistics.median(rises) - 1,
        "rise_of_the_mean": statistics.median(means) - 1,
        "rise_min": min(rises) - 1,
        "rise_max": max(rises) - 1,
    }


def _launch(pipe: Connection, inputs: PipelineInputs, kind: str, rounds: int) -> None:
    import torch

    torch.set_num_threads(1)
    small = torch.zeros(16)

    def steps(count: int) -> list[float]:
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            for _ in range(_OPERATIONS):
                small.add_(1)
            found.append(time.perf_counter() - begun)
        return found

    batches: Batches | None = None
    if kind == "elsewhere":
        other = get_context("spawn").Process(target=_consume, args=(partial(decoder_alone, inputs),))
        other.start()
        assert other.pid is not None
        time.sleep(_START_SECONDS)
        os.kill(other.pid, signal.SIGSTOP)
    else:
        batches = fastvid_loader(inputs, workers=kind)
        next(batches)
    kept, loaded, means = [], [], []
    for _ in range(rounds):
        # Without a consumer the loader is idle once its prefetch queue is full.
        time.sleep(_IDLE_SECONDS)
        without, within = steps(_STEPS), []
        if batches is None:
            os.kill(other.pid, signal.SIGCONT)
            within = steps(_STEPS)
            os.kill(other.pid, signal.SIGSTOP)
        else:
            for _ in range(_TAKEN):
                next(batches)
                # These steps take about as long as the loader needs to replace the batch.
                within += steps(_STEPS // _TAKEN)
        kept.append(statistics.median(without))
        loaded.append(statistics.median(within))
        means.append(statistics.mean(within) / statistics.mean(without))
    if batches is None:
        other.kill()
    pipe.send((kept, loaded, means))
    pipe.close()
    os._exit(0)


def _consume(start: Callable[[], Batches]) -> None:
    for _ in start():
        pass
