"""Writes training runs as one HTML page: curves, where the time went, scaling against the smallest run."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Folders of runs and where the page goes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its run.out")
    parser.add_argument("--out", metavar="FILE", help="the page; report.html in the first run's folder by default")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    from pathlib import Path

    from fastvid.train.run import run_report as report

    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out) if args.out else folders[0] / "report.html"
    out.write_text(report.page(folders), encoding="utf-8")
    print(out)
    return 0
