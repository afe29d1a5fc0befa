"""``python -m bench QUESTION``: measures one thing, prints a table, writes JSON.

A benchmark is a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Final

from fastvid.errors import FastvidError, naming_extras
from fastvid.runtime.command_line import parse

BENCHES: Final = {
    "cold": ("bench.load.cold", "from nothing to the first batch: 100 million samples, 10,000 shards, real footage"),
    "load": ("bench.load.load", "batches a second of whole pipelines against other loaders, on disks and over HTTP"),
    "decode": ("bench.decode.decode", "clips a second against other decoders on the same videos"),
    "gpu": ("bench.gpu.gpu", "one GPU: decoders, lanes, parity, pixels, a training step; all in under 8 minutes"),
    "moments": ("bench.strategies.moments", "Adam under K-step averaging: its moments local, averaged or reset"),
    "motion_sync": (
        "bench.strategies.motion_sync",
        "the motion dataset by kavg, asgd and relay, with the samples of ddp",
    ),
    "elastic": ("bench.elastic.elastic", "nodes that join, leave, are killed and are cut off during training"),
    "launch": ("bench.elastic.launch", "the launch script of the docs on four hosts, one of which loses its power"),
    "motion": ("bench.train.motion_models", "what TSM, I3D and TSN learn of motion; in-place shift against copies"),
    "quality": (
        "bench.shard.quality",
        "what an encoding costs: accuracy of a net trained on it, and SSIM of real videos",
    ),
    "report": ("bench.report", "results as one page with plots, of one machine or several"),
    "scale": (
        "bench.scaling.scale",
        "training on 1 to 10,000 ranks: measured part by part, or predicted from measured parts",
    ),
    "shard": ("bench.shard.shard", "fastvid shard against the same ffmpeg commands run by xargs"),
    "sync": (
        "bench.strategies.sync",
        "the strategies on slow networks and with stragglers: time to a loss, bytes on the wire",
    ),
    "train": ("bench.train.train", "the trainer's own cost over a bare PyTorch loop of the same model"),
    "two_stream": ("bench.train.two_stream", "pictures and optical flow together against each alone, from raw videos"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns its exit code: 0, or 1 when it fails or an output is wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:10} {summary}" for name, (_, summary) in BENCHES.items())
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
    sys.exit(main())
