"""lhotse's DynamicBucketingSampler on given lengths: ``python lhotse_buckets.py IN.npz OUT.json WORLD BUDGET SEED``.

Lengths are given as durations, so that max_duration is the budget of a rank's batch in tokens.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
from lhotse import CutSet, MonoCut
from lhotse.dataset import DynamicBucketingSampler


def user_code(cuts, rank, world, budget, seed):
    ranks = {"rank": rank, "world_size": world, "seed": seed}
    sampler = DynamicBucketingSampler(cuts, max_duration=float(budget), num_buckets=24, shuffle=True, **ranks)
    sampler.set_epoch(0)
    return sampler


def sample(cut):
    """Return the number of a cut; the sampler duplicates cuts, with a suffix, so that all ranks get as many."""
    return int(cut.id.partition("_")[0])


def main():
    source, target, world, budget, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    lengths = np.load(source)["tokens"]
    cuts = CutSet.from_cuts(
        MonoCut(id=str(n), start=0, duration=float(length), channel=0) for n, length in enumerate(lengths.tolist())
    ).to_eager()
    ranks, plan_seconds = [], 0.0
    for rank in range(world):
        begun = time.perf_counter()
        ranks.append([[sample(cut) for cut in batch] for batch in user_code(cuts, rank, world, budget, seed)])
        plan_seconds += time.perf_counter() - begun
    # Resume rank 0 after nine tenths of its steps.
    sampler, stop = user_code(cuts, 0, world, budget, seed), len(ranks[0]) * 9 // 10
    iterator = iter(sampler)
    for _ in range(stop):
        next(iterator)
    state = sampler.state_dict()
    begun = time.perf_counter()
    resumed = user_code(cuts, 0, world, budget, seed)
    resumed.load_state_dict(state)
    left, seconds = [], 0.0
    for batch in resumed:
        seconds = seconds if left else time.perf_counter() - begun
        left.append([sample(cut) for cut in batch])
    exact = left == ranks[0][stop:]
    record = {"ranks": ranks, "resume_seconds": seconds, "resume_exact": exact, "plan_seconds": plan_seconds / world}
    with open(target, "w") as file:
        json.dump(record | {"version": version("lhotse")}, file)


if __name__ == "__main__":
    main()
