"""The page's sections for classes, splits and clips."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS
from fastvid.report.charts import COLOURS
from fastvid.report.markup import definitions, text
from fastvid.report.page import Section
from fastvid.runtime.units import count, duration, percent, size, things
from fastvid.sharding.page.contact_sheet import ContactSheet, FrameStrip
from fastvid.sharding.page.summary import ClassCount, Summary

_SHOWN_CLASSES: Final = 2000
_SHORT_LIST: Final = 60  # maximum number of classes shown without scrolling
_SHOWN_SPLITS: Final = 5


def classes_section(summary: Summary) -> Section:
    """Return the section with every class, its samples by split, and the splits."""
    order = _split_order(summary)
    used = [c for c in summary.class_counts if c.count]
    unused = [c for c in summary.class_counts if not c.count]
    most = max((c.count for c in used), default=1)
    lead = "No sample is visible."
    if used:
        counts = [c.count for c in used]
        median = f"{np.median(counts):.0f}"
        each = f"{count(min(counts))} to {count(most)} samples, median {median}"
        if min(counts) == most:
            each = f"{things(most, 'sample')} each"
        lead = f"{count(len(used))} classes, {each}."
    if len(used) > _SHOWN_CLASSES:
        lead += f" The {count(_SHOWN_CLASSES)} largest are listed."
    rows = "".join(_class_row(c, most, order) for c in used[:_SHOWN_CLASSES])
    without = ""
    if unused:
        names = ", ".join(text(c.name) for c in unused[:_SHOWN_CLASSES])
        without = f'<p class="unused"><b>{count(len(unused))} without a sample</b> {names}</p>'
    short = " short" if len(used) <= _SHORT_LIST else ""
    return Section(
        "Classes",
        f'{_splits(summary)}<div class="tools">'
        '<input type="search" id="find-class" placeholder="Find a class" aria-label="find a class"></div>'
        f'<div class="card"><div class="classes{short}">{rows}</div>{without}</div>',
        lead,
    )


def _class_row(c: ClassCount, most: int, order: Sequence[str]) -> str:
    hours = {name: duration(seconds) for name, seconds in c.split_seconds.items()}
    bar = stack(c.splits or {"samples": c.count}, most, order or ["samples"], hours)
    return (
        f'<div class="class" data-class="{text(c.name)}"><a class="name" href="#c-{_anchor(c.name)}"'
        f' title="{text(c.name)}">{text(c.name)}</a>{bar}<span class="num">{count(c.count)}'
        f" · {duration(c.seconds)}</span></div>"
    )


def stack(parts: Mapping[str, int], total: int, order: Sequence[str], remarks: Mapping[str, str] | None = None) -> str:
    """Return one bar of coloured pieces; `total` is the value of the full width, `remarks` follow the numbers."""
    remarks = {name: f", {remark}" for name, remark in (remarks or {}).items()}
    pieces = [
        f'<i class="c{order.index(name) % COLOURS}" style="width:{100 * number / max(total, 1):.2f}%"'
        f' data-tip="{text(name)}: {count(number)}{text(remarks.get(name, ""))}"></i>'
        for name, number in parts.items()
    ]
    return f'<span class="stack">{"".join(pieces)}</span>'


def _split_order(summary: Summary) -> list[str]:
    """Return the values of the first split column, most samples first: the order of their colours."""
    first = next(iter(summary.split_columns.values()), None)
    return [] if first is None else [name for name, _ in first.most_common()]


def _splits(summary: Summary) -> str:
    rows = []
    for column, values in summary.split_columns.items():
        order = [name for name, _ in values.most_common()]
        parts = "".join(
            f'<span><i class="c{n % COLOURS}"></i>{text(name)} <b>{count(values[name])}</b>'
            f" {percent(values[name], values.total())} · {duration(summary.split_seconds[column][name])}</span>"
            for n, name in enumerate(order[:_SHOWN_SPLITS])
        )
        if len(order) > _SHOWN_SPLITS:
            parts += f"<span>{count(len(order) - _SHOWN_SPLITS)} more</span>"
        bar = stack(dict(values.most_common()), values.total(), order)
        rows.append(f'<span class="mono">{text(column)}</span>{bar}<span class="legend">{parts}</span>')
    return f'<div class="card splits">{"".join(rows)}</div>' if rows else ""


def _anchor(name: str) -> str:
    """Return an HTML id for any class name."""
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=6).hexdigest()


def clips_section(summary: Summary, sheet: ContactSheet) -> Section:
    """Return the section with the contact sheet."""
    groups = []
    counts = {c.name: c.count for c in summary.class_counts}
    for name, strips in sheet.strips.items():
        tiles = "".join(_tile(summary, strip) for strip in strips)
        shown = f"{count(len(strips))} of {count(counts[name])}"
        groups.append(
            f'<div class="group" id="c-{_anchor(name)}" data-class="{text(name)}"><div class="head">'
            f'<h3 title="{text(name)}">{text(name)}</h3><span>{shown}</span></div>'
            f'<div class="tiles">{tiles}</div></div>'
        )
    notes = []
    if sheet.left_out:
        notes.append(f"No space for {count(sheet.left_out)} more classes; raise --max-bytes to show them.")
    if sheet.failed:
        notes.append(f"{things(sheet.failed, 'sample')} could not be decoded; run `fastvid verify` to see why.")
    return Section(
        "Clips",
        f'<div class="groups">{"".join(groups)}</div><p class="more">{text(" ".join(notes))}</p>',
        "Point at a clip to play it; click it for details.",
    )


def _tile(summary: Summary, strip: FrameStrip) -> str:
    row = {name: summary.annotations[name][strip.sample].as_py() for name in summary.annotations.column_names}
    length, key = float(summary.seconds[strip.sample]), text(row["key"])
    label = "" if row["label"] is None else f" ({row['label']})"
    rows: dict[str, Any] = {
        "source": row["source_id"],
        "class": f"{summary.class_names[strip.sample]}{label}",
        "video": f"{row['width']}x{row['height']} {strip.codec}",
        "length": f"{duration(length)}, {count(row['num_frames'])} frames at {row['fps']:.4g} per second",
        "bytes": size(strip.bytes),
    }
    ours = ANNOTATION_FIELDS | FACT_FIELDS
    rows |= {name: value for name, value in row.items() if name not in ours and value is not None}
    return (
        f'<div class="tile" role="button" tabindex="0" aria-label="{key}" data-key="{key}"'
        f' data-packets="{strip.packets}" style="--n:{strip.frames};--w:{strip.width};--p:{strip.frames // 2}">'
        f'<div class="strip" style="background-image:url({strip.uri})"></div>'
        f'<span class="len">{duration(length)}</span><span class="cap">{key}</span><span class="run"></span>'
        f"{definitions(rows)}</div>"
    )
