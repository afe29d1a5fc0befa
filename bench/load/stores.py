"""Measure training from a store that is far away and limits requests.

nodes   Eight processes, four on each of two simulated nodes, read epochs of one dataset: a web server on this machine
        answers after a delay and refuses more than so many requests a second (429). Each node has a cache of its own,
        for sidecars only or for videos too. All clips must be those of one process on the local disk, in order.
memory  One process opens 10,000 shards on a web server in random order and reads a packet table of each: its resident
        memory with the limit of open shards, with a node cache, and without a limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.common.footage import shard as shard_footage
from bench.common.harness import DATASET, Record, options, run_json
from bench.common.rounds import resident
from bench.load.cold import OPEN_SAMPLES, OPEN_SHARDS, make_wide
from bench.load.slow_server import served, slow_server
from fastvid.errors import FastvidError

SCHEMA: Final = "fastvid-bench-stores/1"
WORLD: Final = 8
NODES: Final = 2
_CACHES: Final = {"sidecars": {}, "videos": {"FASTVID_CACHE_VIDEO": "20G"}}
_WAYS: Final = ("limit", "cache", "unlimited")


add_arguments = options(
    "footage cache",
    data=(str, "a dataset; instead of --footage", DATASET),
    json="stores.json",
    epochs=3,
    latency=50.0,
    rate=(200, "requests a second that the store takes"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = Record(SCHEMA, args, "epochs", "rate", world=WORLD, nodes=NODES, latency_ms=args.latency)
    data = args.data or (str(shard_footage(args.footage, "compact", args.cache)) if args.footage else None)
    with tempfile.TemporaryDirectory(prefix="fastvid-stores-") as scratch:
        folder = Path(scratch)
        if data is not None:
            expected = _ranks(data, 1, args.epochs, lambda _: {})["clips"]
            record["dataset_bytes"] = sum(path.stat().st_size for path in Path(data).rglob("*") if path.is_file())
            for name, variables in _CACHES.items():
                record[name] = nodes(args, data, folder / name, variables, expected, record["dataset_bytes"])
        wide = make_wide(folder / "wide")
        with slow_server(Path(wide), 0) as (url, _):
            for way in _WAYS:
                words = ["memory", url, way, str(folder / f"memory-{way}"), str(OPEN_SHARDS), str(OPEN_SAMPLES)]
                record[f"memory {way}"] = run_json([sys.executable, "-m", "bench.load.stores", *words])
    return record.finish()


def nodes(
    args: argparse.Namespace, data: str, folder: Path, variables: Mapping[str, str], expected: str, size: int
) -> dict[str, Any]:
    """Run eight processes on two nodes; return what they took."""
    with slow_server(Path(data), args.latency, rate=args.rate) as (url, _):
        begun = time.perf_counter()
        made = _ranks(
            url,
            WORLD,
            args.epochs,
            lambda rank: {"FASTVID_CACHE": str(folder / f"node{rank * NODES // WORLD}"), **variables},
        )
        spent = time.perf_counter() - begun
        log = served(url)
    if made["clips"] != expected:
        raise FastvidError("eight processes at the store delivered other clips than one process on the disk")
    read = sum(log["bytes"].values())
    return {
        "seconds": spent,
        "bytes_an_epoch_of_dataset": read / args.epochs / size,
        "requests_a_clip": sum(number for kind, number in log["requests"].items() if kind != "429") / made["number"],
        "refused": log["requests"].get("429", 0),
        "dollars": made["dollars"],
        "clips": made["number"],
    }


def _ranks(url: str, world: int, epochs: int, variables: Any) -> dict[str, Any]:
    """Run a loader in each of several processes; return a digest of all clips in order."""

    def one(rank: int) -> dict[str, Any]:
        words = ("-m", "bench.load.stores", "rank", url, str(rank), str(world), str(epochs))
        return run_json([sys.executable, *words], FASTVID_LOG="ERROR", **variables(rank))

    with ThreadPoolExecutor(world) as pool:
        answers = list(pool.map(one, range(world)))
    steps = zip(*(answer["steps"] for answer in answers), strict=True)
    clips = [row for step in steps for row in sorted(row for rows in step for row in rows)]
    return {
        "clips": hashlib.sha256(json.dumps(clips).encode()).hexdigest(),
        "number": len(clips),
        "dollars": sum(answer["dollars"] for answer in answers),
    }


def rank(url: str, number: str, world: str, epochs: str) -> dict[str, Any]:
    """Deliver epochs as one rank; return what each step had."""
    import torch

    import fastvid

    torch.set_num_threads(1)
    loader = fastvid.ClipLoader(
        fastvid.open(url),
        frames=fastvid.Segments(8),
        spatial=fastvid.CenterCrop(112),
        global_batch_size=32,
        last="keep",
        rank=int(number),
        world_size=int(world),
        output=fastvid.Output(dtype=torch.uint8),
        workers=fastvid.Workers(num_threads=1),
    )
    steps = []
    for _ in range(int(epochs)):
        for batch in loader:
            digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch.video.contiguous()]
            steps.append([list(row) for row in zip(batch.position.tolist(), batch.key, digests, strict=True)])
    return {"steps": steps, "dollars": loader.stats.dollars}


def memory(url: str, way: str, cache: str, shards: str, samples: str) -> dict[str, Any]:
    """Read a packet table of each shard in random order; return the resident memory on the way."""
    if way == "cache":
        os.environ["FASTVID_CACHE"] = cache
    import fastvid
    from fastvid.format.dataset import OpenShards

    dataset = fastvid.open(url)
    if way == "unlimited":
        dataset._shards = OpenShards(1 << 60)
    draws = random.Random(0)
    order = draws.sample(range(int(shards)), int(shards))
    found: dict[str, Any] = {"shards": [], "megabytes": []}
    begun = time.perf_counter()
    for place, index in enumerate(order, 1):
        dataset.shard(index).table(draws.randrange(int(samples)))
        if place % (int(shards) // 10) == 0:
            found["shards"].append(place)
            found["megabytes"].append(resident() / 1e6)
    return found | {"seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    print(json.dumps({"rank": rank, "memory": memory}[sys.argv[1]](*sys.argv[2:])))
