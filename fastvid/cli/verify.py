"""``fastvid verify``: check a dataset, or search it for what was removed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastvid.cli.command import forwards
from fastvid.errors import visible
from fastvid.media.checks import CHECKS
from fastvid.runtime.progress import Progress
from fastvid.runtime.values import json_text, size, things
from fastvid.sharding.change.takedown import Receipt, audit_removals
from fastvid.sharding.verify.verify import VerifyReport, repair_sidecars, verify_dataset
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)


@forwards(verify_dataset)
def verify(
    dataset: str,
    *,
    repair: bool = False,
    generation: str | None = None,
    show: int = 20,
    receipt: tuple[str, ...] = (),
    name: tuple[str, ...] = (),
    json: bool = False,
    **options: Any,
) -> int:
    """Check a dataset: hashes, checksums, index rows, facts, labels, and every frame by decoding.

    The exit code is 1 if anything is wrong. --sample N checks only N samples and does not hash the tars. --repair
    rebuilds damaged sidecars from intact tars and checks again.

    With --receipt or --name, search all files of the dataset instead for what `fastvid remove --reason` took down:
    for the hashes and stored bytes of the receipt, and for names, which no receipt contains. The exit code is 1 if
    any is found.

    Args:
        dataset (DIR): Folder of the dataset.
        sample (N): Quick check of N samples instead of all.
        seed (N): Seed of the samples drawn by --sample.
        repair: Rebuild damaged sidecars from their tars.
        generation (N|TAG): Generation to check (default: the current one).
        workers (N): Processes (default: one per core).
        show (N): Problems to print.
        receipt (FILE): Search for what this receipt says is gone.
        name (TEXT): Search for a name, key, caption or other text.
        json: Print everything as one JSON object.
    """
    if receipt or name:
        return _audit(dataset, receipt, name, show, json=json)

    def check() -> VerifyReport:
        line = Progress(0, what="samples")  # appears with the first sample

        def advance(count: int, total: int) -> None:
            line.total = total
            for _ in range(count):
                line.advance()

        found = verify_dataset(dataset, generation=generation, progress=advance, **options)
        if line.total:
            line.finish()
        return found

    report = check()
    if repair and not report.ok:
        repaired = repair_sidecars(dataset, report)
        if repaired:
            _LOG.info("rebuilt the sidecars of %s; checking again", things(len(repaired), "shard"))
            report = check()
            report.repaired = repaired
    print(json_text(report.to_json(), indent=1) if json else _text(report, show))
    return 0 if report.ok else 1


def _audit(dataset: str, files: Sequence[str], names: Sequence[str], show: int, *, json: bool) -> int:
    receipts = []
    for file in files:
        folder, _, name = file.rpartition("/")
        receipts.append(Receipt.from_bytes(open_storage(folder or ".").read(name), file=file))
    done = audit_removals(dataset, receipts, names=names)
    if json:
        print(json_text(done.to_json(), indent=1))
        return 0 if done.ok else 1
    terms = [f"{len(receipt.hashes)} SHA-256 of receipt {receipt.number}" for receipt in receipts]
    terms += [things(len(names), "text")] if names else []
    lines = [f"searched {things(done.files, 'file')}, {size(done.bytes)}, {things(done.members, 'member')} of tars,"]
    lines[0] += f" for {' and '.join(terms)}"
    lines += [f"{trace.file}: {trace.found}" for trace in done.found[:show]]
    if len(done.found) > show:
        lines.append(f"and {len(done.found) - show} more; --show N prints N, --json all")
    lines.append("nothing is found" if done.ok else things(len(done.found), "trace"))
    print("\n".join(map(visible, lines)))
    return 0 if done.ok else 1


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
