"""``fastvid inspect``, ``status``, ``verify``: a dataset's contents, its job's progress, and a check of its files."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np

from fastvid.cli.command import forwards, write_file
from fastvid.errors import StorageError, UsageError, visible
from fastvid.format.schema import LEROBOT
from fastvid.media.checks import CHECKS
from fastvid.media.reasons import Reason
from fastvid.runtime.progress import Progress
from fastvid.runtime.values import check_integers, count, duration, json_text, padded, percent, size, text_width, things
from fastvid.sharding.change.takedown import Receipt, audit_removals
from fastvid.sharding.job.status import FolderStatus, PartStatus, UnfinishedJob, read_status
from fastvid.sharding.page.summary import ClassCount, Summary, Totals, describe, summarize
from fastvid.sharding.verify.verify import VerifyReport, repair_sidecars, verify_dataset
from fastvid.storage import open_storage

_NAME: Final = 12  # width of the name column in characters
_BLOCKS: Final = " ▏▎▍▌▋▊▉█"
_SPLITS: Final = 8  # maximum number of listed values of a split column
_COLUMNS: Final = 12  # maximum number of listed columns


def inspect(
    dataset: str,
    *,
    html: str | None = None,
    max_bytes: int = 8_000_000,
    top: int = 12,
    generation: str | None = None,
    json: bool = False,
) -> int:
    """Show a dataset's samples, hours by class and split, captions and other columns, encoding and rejected sources.

    --html FILE writes a self-contained page: classes and splits, clips of every class that play on hover, and the
    ledger, to be searched.

    Args:
        dataset (DIR): Folder of the dataset.
        html (FILE): Write an HTML page.
        max_bytes (N): Maximum size of the page.
        top (N): Classes to list.
        generation (N|TAG): Generation to show (default: the current one).
        json: Print the numbers as one JSON object.
    """
    check_integers(1, top=top)
    found = summarize(dataset, generation=generation)
    print(json_text(found.to_json(), indent=1) if json else _text(found, top))
    if html is not None:
        from fastvid.sharding.page.page import render_page

        page = render_page(found, max_bytes=max_bytes)
        write_file(html, page, "page")
        if not json:
            print(f"\n{html}: {size(len(page))}")
    return 0


def _text(summary: Summary, top: int) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    note = f" ({visible(summary.generation.note)})" if summary.generation.note else ""
    lines = [f"{summary.url}, generation {summary.generation.number}{note}", ""]
    removed = f", {count(summary.removed)} removed and hidden" if summary.removed else ""
    shards = len(summary.generation.shards)
    lines.append(
        _row(
            "episodes" if LEROBOT in summary.generation.extras else "samples",
            f"{count(summary.num_samples)} in {things(shards, 'shard')}{removed}",
        )
    )
    if summary.num_samples:
        lines += [_row(name, value) for name, value in describe(summary).items()]
    lines += [_row(name, visible(_split(totals))) for name, totals in summary.splits.items()]
    if summary.columns:
        lines += ["", *_columns(summary, width)]
    if summary.is_labelled:
        lines += ["", *_classes(summary, top, width)]
    if summary.sources:
        lines += ["", *_ledger(summary)]
    return "\n".join(lines)


def _split(totals: Totals) -> str:
    every = sum(total.samples for total in totals.values())
    parts = [
        f"{name} {count(total.samples)} ({percent(total.samples, every)}, {duration(total.seconds)})"
        for name, total in islice(totals.items(), _SPLITS)
    ]
    more = len(totals) - len(parts)
    return ", ".join([*parts, f"{count(more)} more"] if more else parts)


def _columns(summary: Summary, width: int) -> list[str]:
    lines, name = [], "columns"
    for column in summary.columns[:_COLUMNS]:
        missing = f", {percent(column.missing, summary.num_samples)} missing" if column.missing else ""
        examples = ", ".join(column.examples)
        line = _row(name, visible(f"{column.name}: {column.kind}{missing}" + (f"; {examples}" if examples else "")))
        lines.append(line if len(line) <= width else line[: width - 1] + "…")
        name = ""
    if more := len(summary.columns) - _COLUMNS:
        lines += [_row("", f"and {count(more)} more")] if more > 0 else []
    return lines


def _classes(summary: Summary, top: int, width: int) -> list[str]:
    classes, counts = summary.class_counts, [c.count for c in summary.labelled]
    most = max(c.count for c in classes)
    line = f"{count(len(counts))}, with {min(counts)} to {max(counts)} samples, median {np.median(counts):.0f}"
    shown = classes[:top]
    names = [visible(c.name) for c in shown]
    column = min(max(map(text_width, names)), 32)
    longest = max(len(f"  {count(c.count)}, {duration(c.seconds)}{_by_split(c)}") for c in shown)
    room = max(8, width - _NAME - column - longest)
    lines = [_row("classes", line)]
    for name, c in zip(names, shown, strict=True):
        short = name if text_width(name) <= column else _shortened(name, column)
        bar = _bar(c.count / most, room)
        lines.append(
            " " * _NAME + f"{padded(short, column)} {bar} {count(c.count)}, {duration(c.seconds)}{_by_split(c)}"
        )
    if len(classes) > top:
        lines.append(" " * _NAME + f"and {count(len(classes) - top)} more; --top N lists N")
    return lines


def _shortened(name: str, width: int) -> str:
    while text_width(name) > width - 1:
        name = name[:-1]
    return name + "…"


def _by_split(c: ClassCount) -> str:
    if not c.splits:
        return ""
    return visible(" (" + ", ".join(f"{name} {count(total.samples)}" for name, total in c.splits.items()) + ")")


def _ledger(summary: Summary) -> list[str]:
    statuses = [f"{count(summary.statuses[name])} {name}" for name in ("packed", "rejected")]
    statuses += [f"{count(summary.statuses['removed'])} removed"] if summary.statuses["removed"] else []
    lines = [
        _row(
            "videos" if LEROBOT in summary.generation.extras else "sources",
            f"{count(summary.sources)}: {', '.join(statuses)}",
        )
    ]
    if summary.duplicates:
        lines.append(" " * _NAME + f"{count(summary.duplicates):>6} duplicate: the same bytes as an earlier source")
    for reason, number in summary.rejected.most_common():
        meaning = Reason(reason).meaning if reason in set(Reason) else ""
        lines.append(" " * _NAME + f"{count(number):>6} {reason}: {meaning}")
    return lines


def _row(name: str, text: str) -> str:
    return f"{name:{_NAME}}{text}"


def _bar(share: float, room: int) -> str:
    eighths = max(round(share * room * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _missing(job: UnfinishedJob | None) -> str:
    """Return the numbers of the parts that must be started again, such as "3,7-9"; empty if there are none."""
    if job is None or not any(part.part for part in job.parts):
        return ""
    of = max(int(part.part.partition("/")[2]) for part in job.parts if part.part)
    well = {int((part.part or "0").partition("/")[0]) for part in job.parts if part.state in ("running", "finished")}
    gaps = [(one + 1, other - 1) for one, other in pairwise([-1, *sorted(well), of])]
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in gaps if first <= last)


_SHOWN: Final = 20  # maximum number of listed processes, without --all


def status(
    folder: str,
    *,
    json: bool = False,
    all: bool = False,  # noqa: A002
    missing: bool = False,
    watch: float | None = None,
) -> int:
    """Show what is in a folder: how far the job is that makes a dataset or adds to it, and the dataset.

    It only reads small records, on a local disk or in an object store, and disturbs no job. A process is "stale" if
    its record says that it is running, but it has ended, or has shown no sign of life for 90 seconds; run its
    command again to resume its work. --json prints one JSON object a line, with the attributes of
    fastvid.sharding.job.status.FolderStatus.

    Exit codes: 0 there is a dataset or a job, 1 there is neither, or the folder cannot be read, 2 wrong usage.

    Args:
        folder (DIR): Folder of the dataset; also s3:// and gs://.
        json: Print JSON.
        all: List all parts; by default at most 20.
        missing: Print only the numbers of the parts that neither run nor have finished, such as 3,7-9, as
            `sbatch --array` takes them.
        watch (SECONDS): Print it every SECONDS until the job is no longer running.
    """
    if watch is not None and not 0 < watch < math.inf:
        raise UsageError(f"--watch is {watch:g}, expected a positive number of seconds")
    while True:
        found = read_status(folder)
        if found.dataset is None and found.job is None:
            raise StorageError("there is no dataset and no unfinished job", file=folder, hint="check the folder's name")
        if missing:
            print(_missing(found.job))
            return 0
        print(json_text(found.to_json()) if json else _status_text(found, every=all), flush=True)
        if watch is None or found.job is None or found.job.state != "running":
            return 0
        time.sleep(watch)


def _status_text(status: FolderStatus, *, every: bool = False) -> str:
    """Render a status as text."""
    lines = [f"{status.folder} at {status.time}"]
    dataset = status.dataset
    if dataset is not None:
        facts = [things(dataset.samples, "sample"), things(dataset.shards, "shard"), size(dataset.bytes)]
        change = dataset.note if dataset.changed is None else f"{dataset.note}, {dataset.changed}"
        lines.append(f"dataset: generation {dataset.generation}, {', '.join(facts)}; last change: {change}")
    if status.job is None:
        lines.append("no unfinished job")
    else:
        lines += _job_lines(status.job, every=every)
    return "\n".join(map(visible, lines))


def _job_lines(job: UnfinishedJob, *, every: bool) -> list[str]:
    shards = f"{count(job.shards_done)} of {'?' if job.shards is None else count(job.shards)} shards"
    lines = [
        f"{job.kind}: fastvid {job.command or '?'}, {job.state}",
        f"  {shards}, {count(job.sources_done)} of {things(job.sources, 'source')}, {size(job.bytes)} written",
        f"  {count(job.packed)} packed, {count(job.rejected)} rejected",
    ]
    lines += [f"{number:10} {reason}" for reason, number in job.reasons.items()]
    if job.state == "running":
        left = "unknown" if job.seconds_left is None else duration(job.seconds_left)
        lines.append(f"  {job.sources_per_second:.2f} sources/s, time left: {left}")
    elif job.state == "uncommitted":
        lines.append("  all shards are written: run the command without --part to commit them")
    else:
        lines.append("  nothing is running: run the same command again to resume")
    states = Counter(part.state for part in job.parts)
    lines.append("  processes: " + (", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none"))
    # List processes that need attention first.
    order = {"stale": 0, "failed": 1, "running": 2, "finished": 3}
    listed = sorted(job.parts, key=lambda part: order[part.state])
    shown = listed if every else listed[:_SHOWN]
    lines += [_part_line(part) for part in shown]
    if len(shown) < len(listed):
        lines.append(f"  and {len(listed) - len(shown)} more: use --all")
    return lines


def _part_line(part: PartStatus) -> str:
    where = f"{part.host} process {part.pid}"
    done = f"{part.shards_done}/{part.shards} shards, {part.sources_done}/{part.sources} sources"
    since = f"started {part.started}, last sign {part.last_sign}"
    return f"  {'all' if part.part is None else part.part:>9} {part.state:8} {where}: {done}, {since}"


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
        receipt (FILE): Search for what was removed according to this receipt.
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
    print(json_text(report.to_json(), indent=1) if json else _checks_text(report, show))
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


def _checks_text(report: VerifyReport, show: int) -> str:
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
