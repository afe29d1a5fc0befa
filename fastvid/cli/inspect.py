"""``fastvid inspect``: what is in a dataset, in the terminal or as an HTML page."""

from __future__ import annotations

import shutil
import unicodedata
from itertools import islice
from typing import Final

import numpy as np

from fastvid.cli.command import write_file
from fastvid.media.reasons import MEANING, Reason
from fastvid.runtime.values import count, duration, json_text, padded, percent, size, text_width, things
from fastvid.sharding.page.summary import ClassCount, Summary, Totals, describe, summarize

_NAME: Final = 12  # width of the name column in characters
_BLOCKS: Final = " ▏▎▍▌▋▊▉█"
_SPLITS: Final = 8  # most values of a split column that are listed
_COLUMNS: Final = 12  # most columns that are listed


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

    --html FILE writes a self-contained page: histograms, clips of every class that play on hover, and the ledger with
    filters.

    Args:
        dataset (DIR): Folder of the dataset.
        html (FILE): Write an HTML page.
        max_bytes (N): Maximum size of the page.
        top (N): Classes to list.
        generation (N|TAG): Generation to show (default: the current one).
        json: Print the numbers as one JSON object.
    """
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
    lines = [f"{summary.url}, generation {summary.generation.number}" + _note(summary.generation.note), ""]
    removed = f", {count(summary.removed)} removed and hidden" if summary.removed else ""
    shards = len(summary.generation.shards)
    lines.append(_row("samples", f"{count(summary.num_samples)} in {things(shards, 'shard')}{removed}"))
    if summary.num_samples:
        lines += [_row(name, value) for name, value in describe(summary).items()]
    lines += [_row(name, _plain(_split(totals))) for name, totals in summary.splits.items()]
    if summary.columns:
        lines += ["", *_columns(summary, width)]
    if summary.is_labelled:
        lines += ["", *_classes(summary.class_counts, top, width)]
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
        line = _row(name, _plain(f"{column.name}: {column.kind}{missing}" + (f"; {examples}" if examples else "")))
        lines.append(line if len(line) <= width else line[: width - 1] + "…")
        name = ""
    if more := len(summary.columns) - _COLUMNS:
        lines += [_row("", f"and {count(more)} more")] if more > 0 else []
    return lines


def _classes(classes: tuple[ClassCount, ...], top: int, width: int) -> list[str]:
    counts = [c.count for c in classes]
    line = f"{count(len(classes))}, with {min(counts)} to {max(counts)} samples, median {np.median(counts):.0f}"
    shown = classes[:top]
    names = [_plain(c.name) for c in shown]
    column = min(max(map(text_width, names)), 32)
    longest = max(len(f"  {count(c.count)}, {duration(c.seconds)}{_by_split(c)}") for c in shown)
    room = max(8, width - _NAME - column - longest)
    lines = [_row("classes", line)]
    for name, c in zip(names, shown, strict=True):
        short = name if text_width(name) <= column else _shortened(name, column)
        bar = _bar(c.count / max(counts), room)
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
    if len(c.splits) < 2:
        return ""
    return _plain(" (" + ", ".join(f"{name} {count(total.samples)}" for name, total in c.splits.items()) + ")")


def _ledger(summary: Summary) -> list[str]:
    statuses = [f"{count(summary.statuses[name])} {name}" for name in ("packed", "rejected")]
    statuses += [f"{count(summary.statuses['removed'])} removed"] if summary.statuses["removed"] else []
    lines = [_row("sources", f"{count(summary.sources)}: {', '.join(statuses)}")]
    if summary.duplicates:
        lines.append(" " * _NAME + f"{count(summary.duplicates):>6} duplicate: the same bytes as an earlier source")
    for reason, number in summary.rejected.most_common():
        meaning = MEANING[Reason(reason)] if reason in set(Reason) else ""
        lines.append(" " * _NAME + f"{count(number):>6} {reason}: {meaning}")
    return lines


def _row(name: str, text: str) -> str:
    return f"{name:{_NAME}}{text}"


def _note(note: str) -> str:
    return f" ({_plain(note)})" if note else ""


def _bar(share: float, room: int) -> str:
    eighths = max(round(share * room * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _plain(text: str) -> str:
    """Replace characters that could move the cursor or reverse the line."""
    return "".join("?" if unicodedata.category(letter) in ("Cc", "Cf") else letter for letter in text)
