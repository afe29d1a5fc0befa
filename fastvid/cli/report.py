"""Render training runs as an HTML page: curves, time by phase, scaling over the smallest run."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its run.out")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first run's folder)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from pathlib import Path

    from fastvid.train.run import run_report as report

    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out) if args.out else folders[0] / "report.html"
    out.write_text(report.page(folders), encoding="utf-8")
    print(out)
    return 0
