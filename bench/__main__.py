"""``python -m bench QUESTION``: run one benchmark, print a table, write JSON.

A benchmark is a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fastvid.errors import FastvidError, naming_extras
from fastvid.runtime.names import parse
from fastvid.runtime.processes import SAFE_PATH

BENCHES: Final = {
    "annotations": (
        "bench.load.annotations",
        "opening ten million rows: time, memory of the node's processes, a query, a key",
    ),
    "audio": ("bench.load.audio", "what sound costs: the CPU time of clips with and without it"),
    "averaging": (
        "bench.strategies.averaging",
        "K-step averaging with AdamW and an adaptive batch against one rank and ddp, on several networks",
    ),
    "batches": (
        "bench.batches.batches",
        "batches of varying shape: samples lost, padding, balance and resume, beside other samplers",
    ),
    "clients": (
        "bench.strategies.clients",
        "asynchronous SGD with 1, 2 and 4 clients against one, and with a slow one",
    ),
    "cold": ("bench.load.cold", "time to the first batch: 100 million samples, 10,000 shards, real footage"),
    "load": ("bench.load.load", "throughput of whole pipelines against other loaders, from disk and over HTTP"),
    "decode": ("bench.decode.decode", "clips/s against other decoders on the same videos"),
    "footage": ("bench.common.footage", "make the footage of other benchmarks: robots, 720p, an hour, a phone"),
    "gpu": ("bench.gpu.gpu", "everything that needs a GPU, proved and measured in half an hour; --pack makes its data"),
    "migration": ("bench.strategies.migration", "a sweep by relay against one that moves the data over a slow wire"),
    "model_speed": ("bench.train.model_speed", "clips/s and multiply-adds of TSM and I3D, forward and training step"),
    "motion_sync": (
        "bench.strategies.motion_sync",
        "training the motion dataset with kavg, asgd and relay, on as many samples as ddp",
    ),
    "elastic": ("bench.elastic.elastic", "nodes that join, leave, are killed and are cut off during training"),
    "index": ("bench.shard.in_place", "indexing videos over a slow network against downloading them"),
    "lerobot": ("bench.load.lerobot", "items of a LeRobot dataset against LeRobot's own loader"),
    "loops": ("bench.load.loops", "the same ten-line job with fastvid and with other libraries"),
    "launch": ("bench.elastic.launch", "the launch script of the docs on four hosts, one of which loses power"),
    "motion": ("bench.train.motion_models", "motion accuracy of TSM, I3D and TSN; in-place shift against copies"),
    "quality": (
        "bench.shard.quality",
        "what an encoding costs: accuracy of a model trained on it, and SSIM of real videos",
    ),
    "report": ("bench.report", "one page with plots of all results, from one machine or several"),
    "reads": ("bench.load.reads", "windows of long videos on a server: planned packets against torchcodec and lance"),
    "scale": (
        "bench.scaling.scale",
        "training on 1 to 10,000 ranks: measured part by part, or predicted from measured parts",
    ),
    "segments": ("bench.shard.segments", "many segments of one long video against ffmpeg that seeks to each"),
    "shard": ("bench.shard.shard", "fastvid shard against the same ffmpeg commands run by xargs"),
    "stores": (
        "bench.load.stores",
        "eight processes on two nodes at a store that limits requests; memory over 10,000 shards",
    ),
    "trace": ("bench.trace", "files, edges and Python calls of one clip and of one source"),
    "train": ("bench.train.train", "the trainer's overhead over a bare PyTorch loop of the same model"),
    "two_stream": ("bench.train.two_stream", "RGB and optical flow together against each alone, from raw videos"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code: 0, or 1 if it fails or an output is wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:11} {summary}" for name, (_, summary) in BENCHES.items())
    if not arguments or arguments[0] not in BENCHES:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(f"usage: python -m bench QUESTION [options]\n\n{listing}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        with naming_extras():
            module = importlib.import_module(BENCHES[arguments[0]][0])
            parser = argparse.ArgumentParser(prog=f"python -m bench {arguments[0]}", description=module.__doc__)
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(parser)
            return int(module.run(parse(parser, arguments[1:])))
    except FastvidError as error:
        print(f"bench {arguments[0]}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    # Children import this copy of the benchmarks, and nothing from the current folder.
    search_path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(SAFE_PATH | {"PYTHONPATH": os.pathsep.join(search_path)})
    sys.exit(main())
