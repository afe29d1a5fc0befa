"""The step time of a thread that launches many small operations, as a model on a GPU does, while fastvid loads."""

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

from bench.load.pipelines import Batches, Work, decoder_alone, fastvid_loader

KINDS: Final = ("elsewhere", "thread", "process")

_OPERATIONS: Final = 400  # of a step
# Short rounds, because a machine that is shared changes its speed within seconds; a batch takes 0.1 s to make.
_STEPS: Final = 120
_TAKEN: Final = 3
_IDLE_SECONDS: Final = 0.6
_START_SECONDS: Final = 5.0


def beside(work: Work, kind: str, rounds: int) -> dict[str, float]:
    """By how much the step of a launch-bound thread takes longer while fastvid loads with the other cores.

    Args:
        work: What is loaded.
        kind: Workers of the loader: "thread" or "process". "elsewhere" is the control: a process that has nothing to do
            with the thread decodes the same clips, so what is measured is the machine.
        rounds: With and without, in turn.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    own = replace(work, workers=max(1, work.workers - 1))
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


def _launch(pipe: Connection, work: Work, kind: str, rounds: int) -> None:
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
        other = get_context("spawn").Process(target=_consume, args=(partial(decoder_alone, work),))
        other.start()
        assert other.pid is not None
        time.sleep(_START_SECONDS)
        os.kill(other.pid, signal.SIGSTOP)
    else:
        batches = fastvid_loader(work, workers=kind)
        next(batches)
    kept, loaded, means = [], [], []
    for _ in range(rounds):
        # While nobody takes batches the loader stands still, once it has made those ahead.
        time.sleep(_IDLE_SECONDS)
        without, within = steps(_STEPS), []
        if batches is None:
            os.kill(other.pid, signal.SIGCONT)
            within = steps(_STEPS)
            os.kill(other.pid, signal.SIGSTOP)
        else:
            for _ in range(_TAKEN):
                next(batches)
                # Until the loader has made good the batch just taken, about as long as a batch takes to make.
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
