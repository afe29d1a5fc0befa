"""Check a dataset: hashes, checksums, index rows, facts, labels, and every frame by decoding.

The exit code is 1 if anything is wrong. --sample N checks only N samples and does not hash the tars. --repair rebuilds
damaged sidecars from intact tars and checks again.

With --receipt or --name, search all files of the dataset instead for what `fastvid remove --reason` took down: for the
hashes and stored bytes of the receipt, and for names, which no receipt contains. The exit code is 1 if any is found.
"""

from __future__ import annotations

import argparse
import json
import logging

from fastvid.errors import visible
from fastvid.runtime.progress import Progress
from fastvid.runtime.values import size, things
from fastvid.sharding.change.receipts import Receipt, audit_removals
from fastvid.sharding.verify.verify import CHECKS, VerifyReport, repair_sidecars, verify_dataset
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)
_FILES = 100  # between two lines of the log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid verify``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--sample", type=int, metavar="N", help="quick check of N samples instead of all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples drawn by --sample (default 0)")
    parser.add_argument("--repair", action="store_true", help="rebuild damaged sidecars from their tars")
    parser.add_argument("--generation", metavar="N|TAG", help="generation to check (default: the current one)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="problems to print (default 20)")
    parser.add_argument(
        "--receipt", action="append", default=[], metavar="FILE", help="search for what this receipt says is gone"
    )
    parser.add_argument(
        "--name", action="append", default=[], metavar="TEXT", help="search for a name, key, caption or other text"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check, repair if requested, and print the report; return 0 if nothing is wrong."""
    if args.receipt or args.name:
        return _audit(args)
    report = _verify(args)
    if args.repair and not report.ok:
        repaired = repair_sidecars(args.dataset, report)
        if repaired:
            _LOG.info("rebuilt the sidecars of %s; checking again", things(len(repaired), "shard"))
            report = _verify(args)
            report.repaired = repaired
    print(json.dumps(report.to_json(), indent=1) if args.json else _text(report, args.show))
    return 0 if report.ok else 1


def _audit(args: argparse.Namespace) -> int:
    receipts = []
    for file in args.receipt:
        folder, _, name = file.rpartition("/")
        receipts.append(Receipt.from_bytes(open_storage(folder or ".").read(name), file=file))
    done = audit_removals(
        args.dataset,
        receipts,
        names=args.name,
        progress=lambda n, total: None if n % _FILES else _LOG.info("%d of %d files", n, total),
    )
    if args.json:
        print(json.dumps(done.to_json(), indent=1))
        return 0 if done.ok else 1
    terms = [f"{len(receipt.hashes)} SHA-256 of receipt {receipt.number}" for receipt in receipts]
    terms += [things(len(args.name), "text")] if args.name else []
    lines = [f"searched {things(done.files, 'file')}, {size(done.bytes)}, {things(done.members, 'member')} of tars,"]
    lines[0] += f" for {' and '.join(terms)}"
    lines += [f"{trace.file}: {trace.what}" for trace in done.traces[: args.show]]
    if len(done.traces) > args.show:
        lines.append(f"and {len(done.traces) - args.show} more; --show N prints N, --json all")
    lines.append("nothing is found" if done.ok else things(len(done.traces), "trace"))
    print("\n".join(map(visible, lines)))
    return 0 if done.ok else 1


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
