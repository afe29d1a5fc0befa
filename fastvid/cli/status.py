"""``fastvid status``: how far a job is, and what the dataset is."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from fastvid.errors import StorageError, UsageError, visible
from fastvid.runtime.values import count, duration, json_text, size, things
from fastvid.sharding.job.status import FolderStatus, PartStatus, UnfinishedJob, read_status

_SHOWN: Final = 20  # most processes listed, without --all


def status(folder: str, *, json: bool = False, all: bool = False, watch: float | None = None) -> int:  # noqa: A002
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
        watch (SECONDS): Print it every SECONDS until the job is no longer running.
    """
    if watch is not None and watch <= 0:
        raise UsageError(f"--watch is {watch:g}, expected a positive number of seconds")
    while True:
        found = read_status(folder)
        if found.dataset is None and found.job is None:
            raise StorageError("there is no dataset and no unfinished job", file=folder, hint="check the folder's name")
        print(json_text(found.to_json()) if json else summary(found, every=all), flush=True)
        if watch is None or found.job is None or found.job.state != "running":
            return 0
        time.sleep(watch)


def summary(status: FolderStatus, *, every: bool = False) -> str:
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
    # Those that need attention first.
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
