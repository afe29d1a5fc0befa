"""Renders a dataset as one self-contained HTML page, for `fastvid inspect --html`.

Its sections are: classes and splits as bars, a contact sheet, the annotation columns, how the samples are encoded, and
a table of the sources with the outcome of each. The contact sheet shows some samples of every class, each as a strip,
which is a row of frames; their number is limited by the size of the page in bytes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import FastvidError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS
from fastvid.media.reasons import Reason
from fastvid.report.charts import COLOURS
from fastvid.report.page import Markup, Section, asset, card, definitions, document, figures, grid, row, table, text
from fastvid.runtime.processes import available_cores
from fastvid.runtime.progress import Progress
from fastvid.runtime.values import count, duration, percent, size, things
from fastvid.sharding.page.summary import ClassCount, Summary, Total, Totals, describe
from fastvid.videos.pictures import encode_picture, spread
from fastvid.videos.video import decode_frames

_LOG = logging.getLogger(__name__)

HEIGHT: Final = 120
"""Height of a frame in a strip, in pixels."""
_WIDTHS: Final = (68, 300)  # minimum and maximum width of a frame
_FRAMES: Final = (12, 4)  # maximum and minimum frames of a strip
# A strip covers this much of the middle of a video: long enough to show an action, short enough to show its motion.
_WINDOW_SECONDS: Final = 6.0
_TILES: Final = 240
_PER_CLASS: Final = (1, 18)
_PROBES: Final = 8  # number of strips to make first, to estimate the size of one


@dataclass(frozen=True, slots=True)
class FrameStrip:
    """Frames of one sample side by side."""

    sample: int  # row of the sample in the summary
    uri: str
    frames: int  # number of frames
    width: int  # width of one frame in pixels; the height is HEIGHT
    codec: str
    bytes: int


@dataclass(slots=True)
class ContactSheet:
    """Strips by class."""

    # strips by class name, classes with most samples first.
    strips: dict[str, list[FrameStrip]] = field(default_factory=dict)
    failed: int = 0  # number of samples that could not be decoded
    left_out: int = 0  # number of classes without a strip for lack of space


def make_contact_sheet(summary: Summary, *, max_bytes: int) -> ContactSheet:
    """Decode strips of a few samples of every class, as many as fit.

    `max_bytes`: maximum size of their HTML. If it is small, strips get fewer frames, then classes get fewer strips,
    then small classes get none.
    """
    rows = _rows_by_class(summary)
    dataset = Dataset(summary.url, generation=summary.generation.number)

    def make(row: int, count: int) -> FrameStrip | None:
        return _strip(dataset, row, float(summary.seconds[row]), count)

    first = [samples[len(samples) // 2] for samples in rows.values()]
    frames = _frames_that_fit([make(row, _FRAMES[0]) for row in first[:_PROBES]], len(first), max_bytes)
    most = min(max(_TILES // max(len(rows), 1), _PER_CLASS[0]), _PER_CLASS[1])
    # The first of every class, then the second of every class, and so on, so that stopping early is fair.
    turns = zip_longest(*([samples[n] for n in spread(len(samples), most)] for samples in rows.values()))
    wanted = [row for turn in turns for row in turn if row is not None]
    sheet, room, undecoded = ContactSheet(), max_bytes, set[str]()
    names = summary.class_names
    progress = Progress(len(wanted), what="clips")
    with ThreadPoolExecutor(available_cores(), thread_name_prefix="contact") as pool:
        for row, strip in zip(wanted, pool.map(lambda row: make(row, frames), wanted), strict=True):
            progress.advance()
            if strip is None:
                sheet.failed += 1
                undecoded.add(names[row])
                continue
            # The first strip of a class also adds the class's heading and the link to it.
            head = "" if names[row] in sheet.strips else _group(names[row], "", "") + _link(names[row])
            room -= len((head + _tile(summary, strip)).encode())
            if room < 0:
                pool.shutdown(wait=True, cancel_futures=True)
                break
            sheet.strips.setdefault(names[row], []).append(strip)
    progress.finish()
    sheet.strips = {name: sheet.strips[name] for name in rows if name in sheet.strips}
    sheet.left_out = len(rows.keys() - sheet.strips.keys() - undecoded)
    return sheet


def pick_frames(num_frames: int, seconds: float, count: int) -> npt.NDArray[np.int64]:
    """Return evenly spaced frames from the middle seconds of a video, int64 [min(count, num_frames)], ascending."""
    window = max(1, min(num_frames, round(num_frames * min(1.0, _WINDOW_SECONDS / max(seconds, 1e-9)))))
    window = max(window, min(count, num_frames))
    return (num_frames - window) // 2 + spread(window, count)


def _strip(dataset: Dataset, sample: int, seconds: float, count: int) -> FrameStrip | None:
    """Return a strip of at most `count` frames; None if the sample cannot be decoded."""
    (index,), (row,) = (place.tolist() for place in dataset.locate([sample]))
    try:
        shard, stream = dataset.shard(index), dataset.streams[0]
        info, table = shard.info(row, stream), shard.table(row, stream)
        frames = pick_frames(info.num_frames, seconds, count)
        width = min(max(round(HEIGHT * info.width / info.height / 2) * 2, _WIDTHS[0]), _WIDTHS[1])
        reader = shard.reader(row, stream)
        shown = decode_frames(info, table, reader, frames, size=(HEIGHT, width), gap=reader.gap).data
    except FastvidError as error:
        _LOG.warning("no strip for %s: %s", dataset.key(sample), error.message)
        return None
    picture = np.ascontiguousarray(shown.transpose(1, 0, 2, 3)).reshape(HEIGHT, len(frames) * width, 3)
    uri, bytes_of_video = encode_picture(picture), int(table.records["size"].sum())
    return FrameStrip(sample, uri, len(frames), width, info.codec.label, bytes_of_video)


def _rows_by_class(summary: Summary) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {c.name: [] for c in summary.class_counts if c.count}
    for sample, name in enumerate(summary.class_names):
        rows[name].append(sample)
    return rows


def _frames_that_fit(probes: Sequence[FrameStrip | None], classes: int, max_bytes: int) -> int:
    """Return the number of frames per strip, within limits, with which every class can get a strip."""
    sizes = [len(strip.uri) / strip.frames for strip in probes if strip is not None]
    if not sizes:
        return _FRAMES[0]
    return int(np.clip(max_bytes / (classes * float(np.mean(sizes))), _FRAMES[1], _FRAMES[0]))


_SHOWN_CLASSES: Final = 2000
_SHORT_LIST: Final = 60  # maximum number of classes shown without scrolling
_SHOWN_SPLITS: Final = 5


def classes_section(summary: Summary, sheet: ContactSheet) -> Section:
    """Return the section with every class, its samples by split, and the splits; without labels, only the splits."""
    if not summary.is_labelled:
        return Section("Splits", _splits(summary), "No sample has a label.")
    order = list(next(iter(summary.splits.values()), ()))
    used = [c for c in summary.class_counts if c.count]
    unused = [c for c in summary.class_counts if not c.count]
    counts = [c.count for c in summary.labelled if c.count]
    most = max(c.count for c in used)
    spread = f"{count(min(counts))} to {count(max(counts))} samples, median {np.median(counts):.0f}"
    each = f"{things(max(counts), 'sample')} each" if min(counts) == max(counts) else spread
    lead = f"{count(len(counts))} {'class' if len(counts) == 1 else 'classes'}, {each}."
    if len(used) > _SHOWN_CLASSES:
        lead += f" The {count(_SHOWN_CLASSES)} largest are listed."
    rows = "".join(_class_row(c, most, order, sheet) for c in used[:_SHOWN_CLASSES])
    without = ""
    if unused:
        names = ", ".join(text(c.name) for c in unused[:_SHOWN_CLASSES])
        without = f"<details><summary>{count(len(unused))} without a sample</summary>{names}</details>"
    short = " short" if len(used) <= _SHORT_LIST else ""
    return Section(
        "Classes",
        f'{_splits(summary)}<div class="tools">'
        '<input type="search" id="find-class" placeholder="Find a class" aria-label="find a class"></div>'
        f'<div class="card"><div class="classes{short}">{rows}</div>{without}</div>',
        lead,
    )


def _class_row(c: ClassCount, most: int, order: Sequence[str], sheet: ContactSheet) -> str:
    link = _link(c.name) if c.name in sheet.strips else ""
    bar = stack(c.splits or {"samples": Total(c.count, c.seconds)}, most, order or ["samples"])
    return (
        f'<div class="class" data-class="{text(c.name)}"><a class="name"{link}'
        f' title="{text(c.name)}">{text(c.name)}</a>{bar}<span class="num">{count(c.count)}'
        f" · {duration(c.seconds)}</span></div>"
    )


def stack(parts: Totals, most: int, order: Sequence[str]) -> str:
    """Return the HTML of a bar with a piece for each of `parts`.

    `most`: number of samples that fill the whole width. `order`: names in the order of their colours.
    """
    pieces = [
        f'<i class="c{order.index(name) % COLOURS}" style="width:{100 * total.samples / max(most, 1):.2f}%"'
        f' data-tip="{text(name)}: {count(total.samples)}, {duration(total.seconds)}"></i>'
        for name, total in parts.items()
    ]
    return f'<span class="stack">{"".join(pieces)}</span>'


def _splits(summary: Summary) -> str:
    rows = []
    for column, values in summary.splits.items():
        every = sum(total.samples for total in values.values())
        parts = "".join(
            f'<span><i class="c{n % COLOURS}"></i>{text(name)} <b>{count(total.samples)}</b>'
            f" {percent(total.samples, every)} · {duration(total.seconds)}</span>"
            for n, (name, total) in enumerate(islice(values.items(), _SHOWN_SPLITS))
        )
        if len(values) > _SHOWN_SPLITS:
            parts += f"<span>{count(len(values) - _SHOWN_SPLITS)} more</span>"
        bar = stack(values, every, list(values))
        rows.append(f'<span class="mono">{text(column)}</span>{bar}<span class="legend">{parts}</span>')
    return f'<div class="card splits">{"".join(rows)}</div>' if rows else ""


def _anchor(name: str) -> str:
    """Return an HTML id for any class name."""
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=6).hexdigest()


def _link(name: str) -> str:
    return f' href="#c-{_anchor(name)}"'


def clips_section(summary: Summary, sheet: ContactSheet) -> Section:
    """Return the section with the contact sheet."""
    groups = []
    counts = {c.name: c.count for c in summary.class_counts}
    for name, strips in sheet.strips.items():
        tiles = "".join(_tile(summary, strip) for strip in strips)
        shown = f"{count(len(strips))} of {count(counts[name])}"
        groups.append(_group(name, shown, tiles))
    notes = []
    if sheet.left_out:
        notes.append(f"No space for {count(sheet.left_out)} more classes; raise --max-bytes to show them.")
    if sheet.failed:
        notes.append(f"{things(sheet.failed, 'sample')} could not be decoded; run `fastvid verify` to see why.")
    more = f'<p class="more">{text(" ".join(notes))}</p>' if notes else ""
    lead = "Point at a clip to play it; click it for details." if groups else ""
    if groups and len(streams := summary.generation.streams) > 1:
        lead += f" The stream shown is {streams[0]}."
    return Section("Clips", f'<div class="groups">{"".join(groups)}</div>{more}', lead)


def _group(name: str, shown: str, tiles: str) -> str:
    return (
        f'<div class="group" id="c-{_anchor(name)}" data-class="{text(name)}"><div class="head">'
        f'<h3 title="{text(name)}">{text(name)}</h3><span>{shown}</span></div>'
        f'<div class="tiles">{tiles}</div></div>'
    )


def _tile(summary: Summary, strip: FrameStrip) -> str:
    row = {name: summary.annotations[name][strip.sample].as_py() for name in summary.annotations.column_names}
    length, key = float(summary.seconds[strip.sample]), text(row["key"])
    label = "" if row["label"] is None else f" ({row['label']})"
    rows: dict[str, Any] = {
        "source": row["source_id"],
        "class": f"{summary.class_names[strip.sample]}{label}",
        "video": f"{row['width']}x{row['height']} {strip.codec}",
        "length": f"{duration(length)}, {things(row['num_frames'], 'frame')} at {row['fps']:.4g} fps",
        "bytes": size(strip.bytes),
    }
    ours = ANNOTATION_FIELDS | FACT_FIELDS
    rows |= {name: value for name, value in row.items() if name not in ours and value is not None}
    return (
        f'<div class="tile" role="button" tabindex="0" aria-label="{key}" data-key="{key}"'
        f' style="--n:{strip.frames};--w:{strip.width};--p:{strip.frames // 2}">'
        f'<div class="strip" style="background-image:url({strip.uri})"></div>'
        f'<span class="len">{duration(length)}</span><span class="cap">{key}</span><span class="run"></span>'
        f"{definitions(rows)}</div>"
    )


_LONGEST: Final = 120  # characters of an example


def columns_section(summary: Summary) -> Section:
    """Return the section with the columns that came with the sources, such as captions; empty without any."""
    rows = [
        [
            one.name,
            one.kind,
            percent(one.missing, summary.num_samples) if one.missing else "none",
            " · ".join(one if len(one) <= _LONGEST else f"{one[: _LONGEST - 1]}…" for one in one.examples),
        ]
        for one in summary.columns
    ]
    listed = table(("column", "type", "missing", "examples"), rows)
    return Section("Columns", card("", listed) if rows else "", "Annotations that came with the sources.")


def encoding_section(summary: Summary) -> Section:
    """Return the section with durations, sizes and rates, the profile and the generations."""
    shard = summary.generation.shards[0]
    past = {
        f"generation {one.number}": ", ".join(filter(None, (one.time[:10], one.note, one.reason))) or "-"
        for one in summary.history
    }
    # What a dataset in place, or one of an older version, does not know is left out.
    some = "of the first shard" if len(summary.profiles) > 1 else ""
    written = {"Profile": shard.profile, "Encoder": shard.encoder}
    cards = (
        card("Video", definitions(describe(summary))),
        *(card(title, definitions(facts), aside=some) for title, facts in written.items() if facts),
        card("History", definitions(past), aside="generations that can be opened"),
    )
    return Section("Encoding", grid(*cards), "Over all visible samples.")


# Browsers lay out this many rows without a noticeable delay.
_ROWS: Final = 4000
_HEADS: Final = ("Result", "Source", "Notes", "Source size", "Stored size", "Frames")
_NUMERIC: Final = (False, False, False, True, True, True)


def ledger_section(summary: Summary, *, max_bytes: int) -> Section | None:
    """Return the section with the ledger, rejected sources first, as many rows as fit; None if there is no ledger."""
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
    removed = f", {count(summary.statuses['removed'])} removed" if summary.statuses["removed"] else ""
    lead = f"{count(summary.sources)} sources: {count(summary.statuses['packed'])} packed, "
    lead += f"{count(summary.rejected.total())} rejected{removed}."
    if len(written) < len(rows):
        lead += f" The first {count(len(written))} are listed; ledger.parquet contains all."
    listed = table(_HEADS, written, numeric=_NUMERIC, attributes=' id="ledger"')
    return Section(
        "Sources",
        '<div class="tools"><input type="search" id="find-source" placeholder="Search sources"'
        ' aria-label="search sources"><span class="found" id="found"></span></div>'
        f'<div class="card sources">{listed}<div class="empty" id="none" hidden>No source matches.</div></div>',
        lead,
    )


def _row(entry: dict[str, Any]) -> Markup:
    reason = entry["reason"]
    kind, meaning = ("ok", "") if entry["status"] == "packed" else ("tag", "taken down, or a dropped duplicate")
    if reason is not None:
        kind = "no"
        meaning = Reason(reason).meaning if reason in set(Reason) else "a reason unknown to this version of fastvid"
    pill = f'<span class="pill {kind}" data-tip="{text(meaning)}">{text(reason or entry["status"])}</span>'
    notes = "".join(f'<span class="pill tag">{text(warning)}</span>' for warning in entry["warnings"] or ())
    if entry["message"]:
        notes += f"<div>{text(entry['message'])}</div>"
    source = Markup(f'<span class="mono">{text(entry["source_id"])}</span>')
    into, out = (size(entry[name]) if entry[name] else "" for name in ("bytes_in", "bytes_out"))
    frames = count(entry["num_frames"]) if entry["num_frames"] is not None else ""
    return row((Markup(pill), source, Markup(notes), into, out, frames), _NUMERIC)


_SMALLEST: Final = 200_000
_NOTES: Final = 8_000  # bytes reserved for notes and for the numbers of strips of each class
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
    room = max_bytes - frame - _NOTES
    if room < 0:
        raise UsageError(
            f"the page takes {frame} bytes without pictures, but {max_bytes} are allowed", hint="raise --max-bytes"
        )
    sheet = make_contact_sheet(summary, max_bytes=room) if summary.num_samples else ContactSheet()
    return _page(summary, sheet, ledger)


def _page(summary: Summary, sheet: ContactSheet, ledger: Section | None) -> bytes:
    found = [classes_section(summary, sheet), clips_section(summary, sheet), columns_section(summary)]
    sections = [*(one for one in found if one.body), encoding_section(summary)] if summary.num_samples else []
    chips: dict[str, object] = {"generation": summary.generation.number, "id": summary.dataset_id[:12]}
    chips |= {"last change": summary.generation.note} if summary.generation.note else {}
    chips |= {"profile": ", ".join(sorted(summary.profiles)), "streams": ", ".join(summary.generation.streams)}
    return document(
        summary.url.rstrip("/").rpartition("/")[2] or summary.url,
        [*sections, *([ledger] if ledger else [])],
        command="inspect",
        lead=summary.url if summary.num_samples else f"{summary.url}: no sample is visible",
        chips=chips,
        top=figures(_figures(summary)),
        end=_DIALOG,
        style=asset("fastvid.sharding.page", "inspect.css"),
        script=asset("fastvid.sharding.page", "inspect.js"),
    ).encode()


def _figures(summary: Summary) -> list[tuple[str, str, str]]:
    classes = set(summary.generation.classes)
    counts = [c.count for c in summary.class_counts if c.name in classes]
    shards = len(summary.generation.shards)
    hidden = f", {count(summary.removed)} removed" if summary.removed else ""
    found = [("Samples", count(summary.num_samples), f"{things(shards, 'shard')}{hidden}")]
    if summary.num_samples:
        seconds = float(summary.seconds.sum())
        found.append(("Video", duration(seconds), things(int(summary.num_frames.sum()), "frame")))
        if used := len(counts) - (unused := counts.count(0)):
            found.append(("Classes", count(used), f"{count(unused)} more without samples" if unused else ""))
        if summary.tar_bytes:
            per_sample = summary.tar_bytes / (summary.generation.num_samples - summary.in_place)
            found.append(("Size", size(summary.tar_bytes), f"{size(per_sample)} per sample"))
        if summary.in_place:
            found.append(("In place", count(summary.in_place), "videos that are not in tars"))
    if summary.sources:
        packed = summary.sources - summary.rejected.total()
        share = percent(packed, summary.sources)
        found.append(("Sources packed", share, f"{count(packed)} of {count(summary.sources)}"))
    return found
