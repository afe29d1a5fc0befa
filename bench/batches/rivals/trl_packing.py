"""TRL's pack_dataset, then torch's DistributedSampler: ``python trl_packing.py IN.npz OUT.json WORLD BUDGET SEED``.

A sample of n tokens is the list of n times its own number, so the packed rows say which samples they contain. A
resumed run packs again, because the packed rows are nowhere but in memory (`datasets` keeps a cache for data from
files), and skips the steps that were taken.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
from datasets import Dataset, disable_progress_bars
from torch.utils.data.distributed import DistributedSampler
from trl.data_utils import pack_dataset


def user_code(dataset, rank, world, budget, seed):
    packed = pack_dataset(dataset, seq_length=budget, strategy="bfd", map_kwargs={"batch_size": 2048})
    sampler = DistributedSampler(packed, num_replicas=world, rank=rank, shuffle=True, seed=seed)
    sampler.set_epoch(0)
    return packed, sampler


def contents(packed, order):
    table = packed.with_format("numpy")
    return [[int(one) for one in np.unique(table[int(row)]["input_ids"])] for row in order]


def main():
    source, target, world, budget, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    disable_progress_bars()
    lengths = np.load(source)["tokens"]
    samples = [np.full(length, number, dtype=np.int32) for number, length in enumerate(lengths.tolist())]
    dataset = Dataset.from_dict({"input_ids": samples})
    begun = time.perf_counter()
    packed, sampler = user_code(dataset, 0, world, budget, seed)
    plan_seconds = time.perf_counter() - begun
    rows = [list(DistributedSampler(packed, world, rank, shuffle=True, seed=seed)) for rank in range(world)]
    by_row = contents(packed, range(len(packed)))
    ranks = [[by_row[row] for row in order] for order in rows]
    stop = len(rows[0]) * 9 // 10
    begun = time.perf_counter()
    again, sampler = user_code(dataset, 0, world, budget, seed)
    rest = list(sampler)[stop:]
    _ = again[int(rest[0])]
    seconds = time.perf_counter() - begun
    exact = contents(again, rest[:20]) == ranks[0][stop : stop + 20]
    record = {"ranks": ranks, "resume_seconds": seconds, "resume_exact": exact, "plan_seconds": plan_seconds}
    with open(target, "w") as file:
        json.dump(record | {"version": version("trl")}, file)


if __name__ == "__main__":
    main()
