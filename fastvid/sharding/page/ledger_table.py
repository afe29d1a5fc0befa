"""The page's table of sources: what became of each, with filters by reason and a text search."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from fastvid.media.reasons import MEANING, Reason
from fastvid.runtime.units import count, size
from fastvid.sharding.page.charts import text
from fastvid.sharding.page.summary import Summary

# A browser lays out this many rows without a pause.
_ROWS: Final = 4000
_COLUMNS: Final = "".join(f'<col style="width:{width}">' for width in ("150px", "33%", "auto", "82px", "82px", "82px"))


def ledger_section(summary: Summary, *, max_bytes: int) -> str:
    """The section, rejected sources first; as many rows as fit. Empty where the dataset has no ledger."""
    if summary.ledger is None or not summary.sources:
        return ""
    rows = sorted(summary.ledger.to_pylist(), key=lambda row: (row["reason"] is None, row["source_id"]))
    written: list[str] = []
    room = max_bytes
    for row in rows[:_ROWS]:
        markup = _row(row)
        room -= len(markup)
        if room < 0:
            break
        written.append(markup)
    packed = summary.sources - summary.rejected.total()
    lead = f"{count(summary.sources)} sources: {count(packed)} packed, {count(summary.rejected.total())} rejected."
    if len(written) < len(rows):
        lead += f" The first {count(len(written))} are listed; ledger.parquet holds all."
    return (
        f'<section id="sources"><h2>Sources</h2><p class="lead">{lead}</p>'
        f'<div class="filters">{_filters(rows, packed)}</div>'
        '<div class="tools"><input type="search" id="find-source" placeholder="Search names and messages"'
        ' aria-label="search sources"><span class="found" id="found"></span></div>'
        '<div class="card table"><table id="ledger">'
        f"<colgroup>{_COLUMNS}</colgroup>"
        "<thead><tr><th>Result</th><th>Source</th><th>Notes</th>"
        '<th class="num">In</th><th class="num">Out</th><th class="num">Frames</th></tr></thead>'
        f'<tbody>{"".join(written)}</tbody></table><div class="empty" id="none" hidden>No source matches.</div></div>'
        "</section>"
    )


def _filters(rows: list[dict[str, Any]], packed: int) -> str:
    reasons = Counter(row["reason"] for row in rows if row["reason"] is not None)
    changes = Counter(warning for row in rows for warning in row["warnings"] or ())
    groups = (
        (
            "status",
            [("", "all", len(rows), "every source"), ("packed", "packed", packed, "sources that became samples")],
        ),
        ("rejected", [(f"r-{reason}", reason, number, _meaning(reason)) for reason, number in reasons.most_common()]),
        (
            "changed",
            [(f"w-{change}", change, number, "packed, and changed so") for change, number in changes.most_common()],
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


def _row(row: dict[str, Any]) -> str:
    reason, warnings = row["reason"], row["warnings"] or []
    tags = [_tag(f"r-{reason}")] if reason is not None else ["packed", *(_tag(f"w-{warning}") for warning in warnings)]
    pill = '<span class="pill ok">packed</span>'
    if reason is not None:
        pill = f'<span class="pill no" data-tip="{text(_meaning(reason))}">{text(reason)}</span>'
    notes = "".join(f'<span class="pill tag">{text(warning)}</span>' for warning in warnings)
    if row["message"]:
        notes += f"<div>{text(row['message'])}</div>"
    into, out = (size(row[name]) if row[name] else "" for name in ("bytes_in", "bytes_out"))
    frames = count(row["num_frames"]) if row["num_frames"] is not None else ""
    return (
        f'<tr data-tags="{text(" ".join(tags))}"><td>{pill}</td><td class="source mono">{text(row["source_id"])}</td>'
        f'<td class="message">{notes}</td><td class="num">{into}</td><td class="num">{out}</td>'
        f'<td class="num">{frames}</td></tr>'
    )


def _tag(name: str) -> str:
    """A tag is one word; foreign ledgers may hold any reason."""
    return "-".join(name.split())


def _meaning(reason: str) -> str:
    return MEANING[Reason(reason)] if reason in set(Reason) else "a reason that this fastvid does not know"
