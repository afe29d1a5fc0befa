"""A dataset as one HTML page without any reference to the outside: `fastvid inspect --html`.

Everything that comes from the dataset passes `charts.text`, which escapes it. The page's own policy forbids the network
and every script but the one whose hash it names, so that a hostile key could do nothing even if it slipped through.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

import fastvid
from fastvid.errors import UsageError
from fastvid.runtime.units import count, duration, percent, size, things
from fastvid.sharding.page.charts import text
from fastvid.sharding.page.classes import classes_section, clips_section
from fastvid.sharding.page.contact_sheet import ContactSheet, make_contact_sheet
from fastvid.sharding.page.distributions import encoding_section, shapes_section
from fastvid.sharding.page.ledger_table import ledger_section
from fastvid.sharding.page.summary import Summary

_SMALLEST: Final = 200_000

_MARK: Final = (
    '<svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true">'
    '<rect width="22" height="22" rx="6" fill="var(--accent)"/>'
    '<path d="M5 15V7M8.5 15v-4M12 15v-2.5M15.5 15V9.5" stroke="#fff" stroke-width="2" stroke-linecap="round"/></svg>'
)
_MOON: Final = (
    '<svg width="15" height="15" viewBox="0 0 16 16" fill="currentColor" aria-hidden="true">'
    '<path d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1Zm0 1.6v10.8A5.4 5.4 0 0 1 8 2.6Z"/></svg>'
)


def render_page(summary: Summary, *, max_bytes: int = 8_000_000) -> bytes:
    """The page, UTF-8.

    Args:
        summary: What it shows.
        max_bytes: Most bytes of the page; what tables leave goes to clips.

    Raises:
        UsageError: `max_bytes` does not even hold the tables.
    """
    if max_bytes < _SMALLEST:
        raise UsageError(f"a page of {max_bytes} bytes holds nothing", hint=f"{_SMALLEST} at least")
    ledger = ledger_section(summary, max_bytes=max_bytes // 4)
    frame = len(_page(summary, ContactSheet(), ledger))
    # Each clip's own markup takes about 1.2 kB beside its picture.
    room = max_bytes - frame
    if room < 0:
        raise UsageError(
            f"the page takes {frame} bytes without a clip, {max_bytes} are allowed", hint="raise --max-bytes"
        )
    sheet = make_contact_sheet(summary, max_bytes=room * 9 // 10) if summary.num_samples else ContactSheet()
    page = _page(summary, sheet, ledger)
    while len(page) > max_bytes and sheet.strips:
        last = max(sheet.strips, key=lambda name: (len(sheet.strips[name]), name))
        sheet.strips[last].pop()
        if not sheet.strips[last]:
            del sheet.strips[last]
            sheet.left_out += 1
        page = _page(summary, sheet, ledger)
    return page


def _page(summary: Summary, sheet: ContactSheet, ledger: str) -> bytes:
    style, script = (_asset(f"inspect.{kind}") for kind in ("css", "js"))
    name = summary.url.rstrip("/").rpartition("/")[2] or summary.url
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sections = (
        classes_section(summary),
        clips_section(summary, sheet),
        shapes_section(summary),
        encoding_section(summary, sheet),
        ledger,
    )
    body = _header(summary, name) + _kpis(summary) + "".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{text(name)} · fastvid</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{_navigation(summary)}<main>{body}{_footer()}</main>\n"
        '<dialog id="clip" aria-label="clip"><button class="close" aria-label="close">&#215;</button>'
        '<div class="stage"></div><div class="body"></div></dialog>\n<div id="tip" role="tooltip"></div>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    ).encode("utf-8", "replace")


def _asset(name: str) -> str:
    return (files("fastvid.sharding.page") / "assets" / name).read_text(encoding="utf-8")


def _navigation(summary: Summary) -> str:
    links = [("classes", "Classes"), ("clips", "Clips"), ("shapes", "Distributions"), ("encoding", "Encoding")]
    links += [("sources", "Sources")] if summary.sources else []
    listed = "".join(f'<a href="#{target}">{label}</a>' for target, label in links)
    return (
        f'<nav><div><span class="mark">{_MARK}fastvid</span>{listed}'
        f'<button id="theme" title="light or dark" aria-label="light or dark">{_MOON}</button></div></nav>\n'
    )


def _header(summary: Summary, name: str) -> str:
    chips = [("generation", summary.generation.number), ("id", summary.dataset_id[:12])]
    chips += [("last change", summary.generation.note)] if summary.generation.note else []
    chips += [("profile", ", ".join(sorted(summary.profiles)))]
    chips += [("streams", ", ".join(summary.generation.streams))]
    listed = "".join(f'<span class="chip">{label} <b>{text(value)}</b></span>' for label, value in chips)
    return (
        f'<header><h1>{text(name)}</h1><div class="path mono">{text(summary.url)}</div>'
        f'<div class="chips">{listed}</div></header>'
    )


def _kpis(summary: Summary) -> str:
    used = sum(c.count > 0 for c in summary.class_counts)
    shards = len(summary.generation.shards)
    hidden = f", {count(summary.removed)} removed" if summary.removed else ""
    cards = [("Samples", count(summary.num_samples), f"{things(shards, 'shard')}{hidden}")]
    if summary.num_samples:
        seconds = float(summary.seconds.sum())
        cards += [
            ("Video", duration(seconds), f"{count(int(summary.num_frames.sum()))} frames"),
            ("Classes", count(used), f"{count(len(summary.class_counts) - used)} without samples"),
            ("Size", size(summary.tar_bytes), f"{size(float(summary.bytes.mean()))} a clip"),
            ("Conforming", percent(summary.conforming, summary.num_samples), "to a profile's promises"),
        ]
    if summary.sources:
        packed = summary.sources - summary.rejected.total()
        cards.append(
            ("Sources packed", percent(packed, summary.sources), f"{count(packed)} of {count(summary.sources)}")
        )
    listed = "".join(
        f'<div class="kpi"><div class="label">{label}</div><div class="value">{_small_unit(value)}</div>'
        f'<div class="sub">{text(sub)}</div></div>'
        for label, value, sub in cards
    )
    return f'<div class="kpis">{listed}</div>'


def _small_unit(value: str) -> str:
    """Units in a smaller type than their numbers."""
    parts = [
        text(part) if part[:1].isdigit() or part[:1] in "<>" else f"<small>{text(part)}</small>"
        for part in value.split(" ")
    ]
    return "&#8239;".join(parts)


def _footer() -> str:
    version = text(fastvid.__version__)
    return (
        f"<footer><span>fastvid {version} inspect</span><span>This page loads nothing from the network.</span></footer>"
    )
