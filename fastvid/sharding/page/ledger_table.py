"""The page's table of sources with their results, filters by reason and a text search."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from fastvid.media.reasons import MEANING, Reason
from fastvid.report.markup import Markup, row, table, text
from fastvid.report.page import Section
from fastvid.runtime.units import count, size
from fastvid.sharding.page.summary import Summary

# Browsers lay out this many rows without a noticeable delay.
_ROWS: Final = 4000
_HEADS: Final = ("Result", "Source", "Notes", "In", "Out", "Frames")
_REMOVED: Final = "sources that were taken down, or duplicates that were dropped"
_NUMERIC: Final = (False, False, False, True, True, True)


def ledger_section(summary: Summary, *, max_bytes: int) -> Section | None:
    """Return the section, rejected sources first, as many rows as fit; None if the dataset has no ledger."""
    if summary.ledger is None or not summary.sources:
        return None
    rows = sorted(summary.ledger.to_pylist(), key=lambda row: (row["reason"] is None, row["source_id"]))
    written: list[Markup] = []
    room = max_bytes
    for entry in rows[:_ROWS]:
        markup = _row(entry)
        room -= len(markup)
        if room < 0:
            break
        written.append(markup)
    packed, removed = summary.statuses["packed"], summary.statuses["removed"]
    lead = f"{count(summary.sources)} sources: {count(packed)} packed, {count(summary.rejected.total())} rejected"
    lead += f", {count(removed)} removed." if removed else "."
    if len(written) < len(rows):
        lead += f" The first {count(len(written))} are listed; ledger.parquet contains all."
    listed = table(_HEADS, written, numeric=_NUMERIC, attributes=' id="ledger"')
    return Section(
        "Sources",
        f'<div class="filters">{_filters(rows, packed, removed)}</div>'
        '<div class="tools"><input type="search" id="find-source" placeholder="Search names and messages"'
        ' aria-label="search sources"><span class="found" id="found"></span></div>'
        f'<div class="card sources">{listed}<div class="empty" id="none" hidden>No source matches.</div></div>',
        lead,
    )


def _filters(rows: list[dict[str, Any]], packed: int, removed: int) -> str:
    reasons = Counter(row["reason"] for row in rows if row["reason"] is not None)
    changes = Counter(warning for row in rows for warning in row["warnings"] or ())
    groups = (
        (
            "status",
            [
                ("", "all", len(rows), "every source"),
                ("packed", "packed", packed, "sources that became samples"),
                *([("removed", "removed", removed, _REMOVED)] if removed else []),
            ],
        ),
        ("rejected", [(f"r-{reason}", reason, number, _meaning(reason)) for reason, number in reasons.most_common()]),
        (
            "changed",
            [(f"w-{change}", change, number, "packed with this change") for change, number in changes.most_common()],
        ),
    )
    return "".join(
        f"<div><span>{label}</span>{''.join(map(_button, entries))}</div>" for label, entries in groups if entries
    )


def _button(entry: tuple[str, str, int, str]) -> str:
    tag, name, number, tip = entry
    return (
        f'<button data-tag="{text(_tag(tag))}" aria-pressed="{str(not tag).lower()}" data-tip="{text(tip)}">'
        f"{text(name)}<b>{count(number)}</b></button>"
    )


def _row(entry: dict[str, Any]) -> Markup:
    reason, warnings = entry["reason"], entry["warnings"] or []
    status = "removed" if entry["status"] == "removed" else "packed"
    tags = [_tag(f"r-{reason}")] if reason is not None else [status, *(_tag(f"w-{warning}") for warning in warnings)]
    pill = '<span class="pill ok">packed</span>'
    if status == "removed":
        pill = f'<span class="pill tag" data-tip="{text(_REMOVED)}">removed</span>'
    if reason is not None:
        pill = f'<span class="pill no" data-tip="{text(_meaning(reason))}">{text(reason)}</span>'
    notes = "".join(f'<span class="pill tag">{text(warning)}</span>' for warning in warnings)
    if entry["message"]:
        notes += f"<div>{text(entry['message'])}</div>"
    source = Markup(f'<span class="mono">{text(entry["source_id"])}</span>')
    into, out = (size(entry[name]) if entry[name] else "" for name in ("bytes_in", "bytes_out"))
    frames = count(entry["num_frames"]) if entry["num_frames"] is not None else ""
    cells = (Markup(pill), source, Markup(notes), into, out, frames)
    return row(cells, _NUMERIC, f' data-tags="{text(" ".join(tags))}"')


def _tag(name: str) -> str:
    """Return a tag without spaces; ledgers of other tools may contain any reason."""
    return "-".join(name.split())


def _meaning(reason: str) -> str:
    return MEANING[Reason(reason)] if reason in set(Reason) else "a reason unknown to this version of fastvid"
