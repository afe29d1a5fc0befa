"""Run all steps on this machine, without a GPU.

Makes a motion dataset with ffmpeg, shards it, times the loader, trains TSM and a control under torchrun, and writes
summary.json and report.html.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid demo``."""
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to; emptied first")
    parser.add_argument("--seed", type=int, default=0, help="seed of the videos and of training")
    parser.add_argument("--processes", type=int, default=2, help="training processes under torchrun")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print its summary as JSON."""
    import json

    from fastvid.demo import run as demo

    summary = demo.run(args.out, seed=args.seed, processes=args.processes)
    print(json.dumps(summary, indent=1))
    return 0
