"""Compare plans of batches of varying shape: samples lost, padding, balance of ranks, resume, lines of code.

Clips as long and as large as in Kinetics and Panda-70M, without the videos, all of them known before anything is read.
In each round every contender divides the same clips, in another order of contenders. Rivals run in environments of
their own, given by their Python interpreters; without one a rival is left out.

packed   fastvid's `Packed`; trl: TRL's pack_dataset (best fit decreasing) and torch's DistributedSampler
buckets  fastvid's `Buckets`; lhotse: lhotse's DynamicBucketingSampler, whose batches are padded to their longest clip
many     fastvid's plans of many samples

Tokens are those after a model's 2 x 2 merging, patches of 2 x 28 x 28.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.harness import Record, options
from bench.common.rounds import in_turn, spread
from fastvid.errors import JobError
from fastvid.load.clips.crops import Native, Spatial
from fastvid.load.clips.timed_sampling import AtFps
from fastvid.load.order.buckets import Buckets, ClipSizes, Planned, patches
from fastvid.load.order.draws import Permutation
from fastvid.load.order.epoch import MASKED
from fastvid.load.order.packed import Packed, cost
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.processes import World

SIDES: Final = ((720, 1280), (1080, 1920), (480, 640), (1280, 720), (360, 640), (1080, 1080))
"""Height and width of the videos."""

_SHARES: Final = (0.45, 0.2, 0.15, 0.1, 0.05, 0.05)

FRAMES: Final = AtFps(2, min_frames=4, max_frames=256, multiple=2)
"""The rate of Qwen2-VL's processor. No clip is larger than a bin: 256 frames have 8,192 tokens."""

PIXELS: Final = 224 * 224


def clip_sizes(samples: int, seed: int = 0) -> ClipSizes:
    """Return the sizes of clips at 2 frames a second and at most about 224 x 224 pixels.

    Two fifths are like Kinetics: 10 seconds, one in ten shorter. The others are like Panda-70M: log-normal durations of
    8.5 seconds on average (its paper, table 1), here with a median of 6.1 and a sigma of 0.8.
    """
    draws = np.random.default_rng(seed)
    cut = np.where(draws.random(samples) < 0.9, 10.0, draws.uniform(2, 10, samples))
    shot = np.exp(draws.normal(np.log(6.1), 0.8, samples))
    seconds = np.where(draws.random(samples) < 0.4, cut, shot)
    sides = np.asarray(SIDES)[draws.choice(len(SIDES), samples, p=_SHARES)]
    spatial = Spatial.of(Native(28, max_pixels=PIXELS))
    num_frames = np.maximum(1, np.rint(seconds * 30)).astype(np.int64)
    frames = FRAMES.count(num_frames, np.full(samples, 30.0))
    return ClipSizes(frames, *spatial.sizes(sides[:, 0].copy(), sides[:, 1].copy()))


Steps = Sequence[Sequence[Sequence[int]]]
"""For each rank its steps, and for each step the samples."""


def score(ranks: Steps, tokens: IntArray, room: IntArray, quadratic_from: int) -> dict[str, Any]:
    """Return what can be said of the batches of an epoch.

    `ranks`: for each rank its steps, and for each step its samples; steps that only some ranks take are last.
    `tokens`: tokens of each sample as delivered, int64 [N]. `room`: tokens that each (rank, step) occupies in
    memory, padding included, int64 [W, S] for the common steps.
    """
    seen = Counter(sample for steps in ranks for step in steps for sample in step)
    common = min(map(len, ranks))
    costs = cost(tokens, quadratic_from)
    loads = np.asarray([[costs[list(step)].sum() for step in steps[:common]] for steps in ranks], dtype=np.float64)
    used = sum(int(tokens[list(step)].sum()) for steps in ranks for step in steps[:common])
    uneven = loads.max(axis=0) / loads.mean(axis=0)
    return {
        "lost": len(tokens) - len(seen),
        "doubled": sum(seen.values()) - len(seen),
        "padding": 1 - used / int(room.sum()),
        "imbalance": float(uneven.mean()),
        "imbalance_p99": float(np.quantile(uneven, 0.99)),
        "equal_steps": len({len(steps) for steps in ranks}) == 1,
        "steps": [min(map(len, ranks)), max(map(len, ranks))],
    }


SCHEMA: Final = "fastvid-bench-batches/1"

PATCH: Final = (2, 28, 28)
QUADRATIC_FROM: Final = 6144
TOKENS: Final = 8192
"""Tokens of a bin, or of a rank's batch."""

SHAPES: Final = tuple((t, h, w) for t in (4, 8, 12, 16, 20, 32, 64) for h, w in ((168, 280), (280, 168), (224, 224)))
_RIVALS: Final = Path(__file__).parent / "rivals"


add_arguments = options(
    json="batches.json",
    samples=(20_000, "clips to compare on"),
    many=(10_000_000, "clips to plan alone"),
    world=(4, "ranks"),
    rounds=(3, "rounds, each with another seed"),
    lhotse=(str, "interpreter of an environment with lhotse", {"metavar": "PYTHON"}),
    trl=(str, "interpreter of an environment with trl", {"metavar": "PYTHON"}),
)


def packed_code(sizes: ClipSizes, rank: int, world: int) -> Planned:
    """What a user writes for packing: one argument of the loader."""
    return Packed(TOKENS, PATCH, bins=world, quadratic_from=QUADRATIC_FROM).plan(sizes, World(rank, world), "keep", str)


def buckets_code(sizes: ClipSizes, rank: int, world: int) -> Planned:
    """What a user writes for buckets: one argument of the loader."""
    return Buckets(SHAPES, tokens=TOKENS * world, patch=PATCH, multiple=world).plan(
        sizes, World(rank, world), "keep", str
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="fastvid-batches-") as scratch:
        contenders: dict[str, Callable[[ClipSizes, int], dict[str, Any]]] = {
            "fastvid Packed": lambda sizes, seed: ours(packed_code, sizes, args.world, seed),
            "fastvid Buckets": lambda sizes, seed: ours(buckets_code, sizes, args.world, seed),
        }
        for name, script, python in (
            ("trl pack_dataset", "trl_packing.py", args.trl),
            ("lhotse DynamicBucketingSampler", "lhotse_buckets.py", args.lhotse),
        ):
            if python:
                contenders[name] = partial(theirs, script, python, Path(scratch), args.world)

        def once(name: str, number: int) -> dict[str, Any]:
            found = contenders[name](clip_sizes(args.samples, number), number)
            print(f"round {number + 1}: {name}: {found}", flush=True)
            return found

        rounds = in_turn(tuple(contenders), args.rounds, once)
    record = Record(SCHEMA, args, contenders={name: summary(results) for name, results in rounds.items()})
    record["settings"] = {"samples": args.samples, "world": args.world, "tokens": TOKENS, "patch": PATCH}
    if args.many:
        record["many"] = many(args.many, args.world)
    return record.finish()


def ours(code: Callable[[ClipSizes, int, int], Planned], sizes: ClipSizes, world: int, seed: int) -> dict[str, Any]:
    """Score one of fastvid's plans."""
    order = Permutation(len(sizes), seed, 0)
    ids = order.ids(np.arange(len(sizes)))
    begun = time.perf_counter()
    epoch = code(sizes, 0, world).epoch(order)
    count = epoch.count(0)
    seconds = time.perf_counter() - begun
    tokens, room, ranks = sizes.tokens(PATCH), np.full((world, count), TOKENS, dtype=np.int64), []
    for rank in range(world):
        shares = list(code(sizes, rank, world).epoch(order).shares(0))
        ranks.append([ids[share.positions[share.positions != MASKED]].tolist() for share in shares])
        for number, share in enumerate(shares):
            if share.shape is not None:  # the sampler makes every clip as long as its bucket
                each = patches(share.shape, PATCH)
                tokens[ranks[-1][number]] = each
                room[rank, number] = each * len(share.positions)
    position = list(epoch.shares(0))[count * 9 // 10].start
    begun = time.perf_counter()
    rest = code(sizes, 0, world).epoch(order).shares(position)
    first = next(rest)
    resumed = time.perf_counter() - begun
    left = [ids[share.positions[share.positions != MASKED]].tolist() for share in (first, *rest)]
    lines = len(inspect.getsource(code).splitlines()) - 2
    return score(ranks, tokens, room, QUADRATIC_FROM) | {
        "resume_seconds": resumed,
        "resume_exact": left == ranks[0][count * 9 // 10 :],
        "plan_seconds": seconds,
        "lines": lines,
    }


def theirs(script: str, python: str, scratch: Path, world: int, sizes: ClipSizes, seed: int) -> dict[str, Any]:
    """Score a rival."""
    tokens: IntArray = sizes.tokens(PATCH)
    np.savez(scratch / "in.npz", tokens=tokens)
    command = [python, "-P", str(_RIVALS / script), str(scratch / "in.npz"), str(scratch / "out.json")]
    done = subprocess.run(
        [*command, str(world), str(TOKENS), str(seed)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise JobError(f"{script} failed with {python}: {done.stderr[-2000:]}")
    found = json.loads((scratch / "out.json").read_text())
    ranks = found.pop("ranks")
    common = min(map(len, ranks))
    if "trl" in script:
        room = np.full((world, common), TOKENS, dtype=np.int64)
    else:  # padded to the longest clip of the batch
        room = np.asarray([[len(step) * tokens[step].max() for step in steps[:common]] for steps in ranks])
    source = (_RIVALS / script).read_text().partition("def user_code")[2].partition("\n\n\n")[0]
    return score(ranks, tokens, room, QUADRATIC_FROM) | found | {"lines": len(source.splitlines()) - 1}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number with its least and greatest value, and other values as they are."""
    found: dict[str, Any] = {}
    for name, first in results[0].items():
        values = [one[name] for one in results]
        if isinstance(first, int | float) and not isinstance(first, bool):
            found[name] = spread(values, "least", "most")
        else:
            found[name] = first if values.count(first) == len(values) else values
    return found


def many(samples: int, world: int) -> dict[str, Any]:
    """Plan many samples: seconds until the first batch is known, and until all are; of the clock and of the CPU."""
    sizes, order, found = clip_sizes(samples), Permutation(samples, 0, 0), {}
    for name, code in (("Packed", packed_code), ("Buckets", buckets_code)):
        marks = [(time.perf_counter(), time.process_time())]
        plan = code(sizes, 0, world)
        marks.append((time.perf_counter(), time.process_time()))
        epoch = plan.epoch(order)
        next(epoch.shares(0))
        marks.append((time.perf_counter(), time.process_time()))
        count = epoch.count(0)
        marks.append((time.perf_counter(), time.process_time()))
        found[name] = {"samples": samples, "batches": count}
        for number, kind in enumerate(("seconds", "cpu_seconds")):
            begun, facts, first, last = (mark[number] for mark in marks)
            spans = {"facts": facts - begun, "first": first - facts, "all": last - facts}
            found[name] |= {f"{part}_{kind}": span for part, span in spans.items()}
        print(f"plan {name}: {found[name]}", flush=True)
    return found
