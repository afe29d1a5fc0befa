"""Check a dataset: hashes, checksums, index rows, facts, labels, and every frame by decoding.

The exit code is 1 if anything is wrong. --sample N checks only N samples and does not hash the tars. --repair rebuilds
damaged sidecars from intact tars and checks again.
"""

from __future__ import annotations

import argparse
import json
import logging

from fastvid.runtime.progress import Progress
from fastvid.runtime.units import things
from fastvid.sharding.verify.verify import CHECKS, VerifyReport, repair_sidecars, verify_dataset

_LOG = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid verify``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--sample", type=int, metavar="N", help="quick check of N samples instead of all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples drawn by --sample (default 0)")
    parser.add_argument("--repair", action="store_true", help="rebuild damaged sidecars from their tars")
    parser.add_argument("--generation", type=int, metavar="N", help="generation to check (default: the current one)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="problems to print (default 20)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check, repair if requested, and print the report; return 0 if nothing is wrong."""
    report = _verify(args)
    if args.repair and not report.ok:
        repaired = repair_sidecars(args.dataset, report)
        if repaired:
            _LOG.info("rebuilt the sidecars of %s; checking again", things(len(repaired), "shard"))
            report = _verify(args)
            report.repaired = repaired
    print(json.dumps(report.to_json(), indent=1) if args.json else _text(report, args.show))
    return 0 if report.ok else 1


def _verify(args: argparse.Namespace) -> VerifyReport:
    line: Progress | None = None

    def progress(count: int, total: int) -> None:
        nonlocal line
        line = line or Progress(total, what="samples")
        for _ in range(count):
            line.advance()

    report = verify_dataset(
        args.dataset,
        generation=args.generation,
        sample=args.sample,
        seed=args.seed,
        workers=args.workers,
        progress=progress,
    )
    if line is not None:
        line.finish()
    return report


def _text(report: VerifyReport, show: int) -> str:
    found = {name: sum(problem.check == name for problem in report.problems) for name in CHECKS}
    lines = [f"generation {report.generation}, {report.samples} of {things(report.total, 'sample')} decoded", ""]
    lines.append(f"{'check':12} {'checked':>8} {'wrong':>7}")
    for name, meaning in CHECKS.items():
        checked = report.checked[name]
        if checked or found[name]:
            state = f"{found[name]:7}" if found[name] else f"{'-':>7}"
            lines.append(f"{name:12} {checked:8} {state}  {meaning}")
    skipped = [name for name in CHECKS if not report.checked[name] and not found[name] and name != "process"]
    if skipped:
        lines.append(f"not checked: {', '.join(skipped)}")
    if report.problems:
        lines.append("")
    for problem in report.problems[:show]:
        where = " ".join(part for part in (problem.shard, problem.key, problem.stream) if part)
        lines.append(f"{problem.check}: {where + ': ' if where else ''}{problem.message}")
    if len(report.problems) > show:
        lines.append(f"and {len(report.problems) - show} more; --show N prints N, --json all")
    lines.append("")
    if report.repaired:
        lines.append(f"rebuilt sidecars: {', '.join(report.repaired)}")
    lines.append("nothing is wrong" if report.ok else things(len(report.problems), "problem"))
    return "\n".join(lines)
