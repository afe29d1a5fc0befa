"""Renders a dataset as one self-contained HTML page, for `fastvid inspect --html`."""

from __future__ import annotations

from typing import Final

from fastvid.errors import UsageError
from fastvid.report.markup import figures
from fastvid.report.page import Section, asset, document
from fastvid.runtime.units import count, duration, percent, size, things
from fastvid.sharding.page.classes import classes_section, clips_section
from fastvid.sharding.page.contact_sheet import ContactSheet, make_contact_sheet
from fastvid.sharding.page.distributions import columns_section, encoding_section, shapes_section
from fastvid.sharding.page.ledger_table import ledger_section
from fastvid.sharding.page.summary import Summary

_SMALLEST: Final = 200_000
_DIALOG: Final = (
    '<dialog id="clip" aria-label="clip"><button class="close" aria-label="close">&#215;</button>'
    '<div class="stage"></div><div class="body"></div></dialog>\n'
)


def render_page(summary: Summary, *, max_bytes: int = 8_000_000) -> bytes:
    """Return the page, UTF-8."""
    if max_bytes < _SMALLEST:
        raise UsageError(f"a page of {max_bytes} bytes is too small", hint=f"allow at least {_SMALLEST}")
    ledger = ledger_section(summary, max_bytes=max_bytes // 4)
    frame = len(_page(summary, ContactSheet(), ledger))
    # The markup of each strip takes about 1.2 kB in addition to its picture.
    room = max_bytes - frame
    if room < 0:
        raise UsageError(
            f"the page takes {frame} bytes without strips, but {max_bytes} are allowed", hint="raise --max-bytes"
        )
    sheet = make_contact_sheet(summary, max_bytes=room * 9 // 10) if summary.num_samples else ContactSheet()
    whole = _page(summary, sheet, ledger)
    while len(whole) > max_bytes and sheet.strips:
        last = max(sheet.strips, key=lambda name: (len(sheet.strips[name]), name))
        sheet.strips[last].pop()
        if not sheet.strips[last]:
            del sheet.strips[last]
            sheet.left_out += 1
        whole = _page(summary, sheet, ledger)
    return whole


def _page(summary: Summary, sheet: ContactSheet, ledger: Section | None) -> bytes:
    sections = [classes_section(summary), clips_section(summary, sheet)]
    sections += [columns_section(summary)] if summary.columns else []
    if summary.num_samples:
        sections += [shapes_section(summary), encoding_section(summary, sheet)]
    chips: dict[str, object] = {"generation": summary.generation.number, "id": summary.dataset_id[:12]}
    chips |= {"last change": summary.generation.note} if summary.generation.note else {}
    chips |= {"profile": ", ".join(sorted(summary.profiles)), "streams": ", ".join(summary.generation.streams)}
    return document(
        summary.url.rstrip("/").rpartition("/")[2] or summary.url,
        [*sections, *([ledger] if ledger else [])],
        command="inspect",
        lead=summary.url,
        chips=chips,
        top=figures(_figures(summary)),
        end=_DIALOG,
        style=asset("fastvid.sharding.page", "inspect.css"),
        script=asset("fastvid.sharding.page", "inspect.js"),
    ).encode()


def _figures(summary: Summary) -> list[tuple[str, str, str]]:
    used = sum(c.count > 0 for c in summary.class_counts if c.name in set(summary.generation.classes))
    shards = len(summary.generation.shards)
    hidden = f", {count(summary.removed)} removed" if summary.removed else ""
    found = [("Samples", count(summary.num_samples), f"{things(shards, 'shard')}{hidden}")]
    if summary.num_samples:
        seconds = float(summary.seconds.sum())
        found += [
            ("Video", duration(seconds), f"{count(int(summary.num_frames.sum()))} frames"),
            ("Classes", count(used), f"{count(len(summary.generation.classes) - used)} without samples"),
        ]
        encoding = summary.encoding
        if summary.tar_bytes:
            per_sample = summary.tar_bytes / (summary.generation.num_samples - summary.in_place)
            found.append(("Size", size(summary.tar_bytes), f"{size(per_sample)} per sample"))
        if summary.in_place:
            found.append(("In place", count(summary.in_place), "videos that are not in tars"))
        if encoding.num_samples and summary.tar_bytes:
            share = percent(encoding.conforming, encoding.num_samples)
            found.append(("Conforming", share, "to a profile's promises"))
    if summary.sources:
        packed = summary.sources - summary.rejected.total()
        share = percent(packed, summary.sources)
        found.append(("Sources packed", share, f"{count(packed)} of {count(summary.sources)}"))
    return found
