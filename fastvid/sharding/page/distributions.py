"""The page's distributions, and its section about the encoding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fastvid.report.charts import bars, histogram
from fastvid.report.markup import card, definitions, grid, table, text
from fastvid.report.page import Section
from fastvid.runtime.units import axis_bytes, axis_seconds, count, duration, percent, shares, size, things
from fastvid.sharding.page.contact_sheet import ContactSheet
from fastvid.sharding.page.summary import Summary

_SHOWN: Final = 7  # number of most common values shown
_LONGEST: Final = 120  # characters of an example
_PACKETS: Final = {
    "k": "key: decoding starts here",
    "r": "referenced: other packets refer to it",
    "d": "droppable: left out unless its frame is requested",
}


def shapes_section(summary: Summary) -> Section:
    """Return the section with durations, bytes, sizes and rates."""
    per_clip = summary.encoding.bytes.astype(np.float64)
    cards = [
        ("Duration", "seconds of each sample", histogram(summary.seconds, duration, axis_seconds, what="samples")),
        ("Frame size", "width x height in pixels", _common(summary.sizes)),
        ("Frame rate", "frames per second", _common(summary.rates)),
    ]
    if len(per_clip):
        some = "each sample" if summary.encoding.is_complete else things(len(per_clip), "sample")
        cards.insert(1, ("Bytes", f"encoded video of {some}", histogram(per_clip, size, axis_bytes, what="samples")))
    listed = (card(title, chart, aside=what) for title, what, chart in cards)
    return Section("Distributions", grid(*listed), "Over all visible samples.")


def _common(counts: Counter[str]) -> str:
    """Return the most common values as bars."""
    shown = dict(counts.most_common(_SHOWN))
    if rest := counts.total() - sum(shown.values()):
        shown[f"{len(counts) - _SHOWN} others"] = rest
    return bars(shown, label=lambda number: f"{count(int(number))} · {percent(number, counts.total())}")


def columns_section(summary: Summary) -> Section:
    """Return the section with the columns that came with the sources, such as captions."""
    rows = [
        [
            one.name,
            one.kind,
            percent(one.missing, summary.num_samples) if one.missing else "none",
            " · ".join(_short(example) for example in one.examples),
        ]
        for one in summary.columns
    ]
    listed = table(("column", "type", "missing", "examples"), rows)
    return Section("Columns", card("", listed), "Annotations that came with the sources.")


def _short(example: str) -> str:
    return example if len(example) <= _LONGEST else f"{example[: _LONGEST - 1]}…"


def encoding_section(summary: Summary, sheet: ContactSheet) -> Section:
    """Return the section with packets of one sample, the profile and the generations."""
    shard, encoding = summary.generation.shards[0], summary.encoding
    video = {
        "packets per key frame": f"{encoding.packets_per_key:.1f}",
        "droppable packets": percent(encoding.droppable_share, 1),
        "codec": shares(encoding.codecs),
        "colour": shares(encoding.colours),
        "bit rate": f"{encoding.bit_rate / 1000:.0f} kbit/s",
        "decoded whole": f"{count(encoding.whole)} of {things(encoding.num_samples, 'sample')}",
        "profile": _profile(shard.profile),
        "encoder": _encoder(shard.encoder),
    }
    read = "" if encoding.is_complete else f"{count(encoding.shards)} of {things(encoding.of, 'shard')}"
    past = {
        f"generation {one.number}": ", ".join(filter(None, (one.time[:10], one.note, one.reason))) or "-"
        for one in summary.history
    }
    return Section(
        "Encoding",
        _packets_of_one(summary, sheet)
        + grid(
            card("Video", definitions(video), aside=read),
            card("History", definitions(past), aside="generations that can be opened"),
        ),
        "How samples are encoded, and what decoding a training clip requires.",
    )


def _packets_of_one(summary: Summary, sheet: ContactSheet) -> str:
    strips = [strip for found in sheet.strips.values() for strip in found]
    if not strips:
        return ""
    # The sample with the most packets, to show the pattern.
    chosen = max(strips, key=lambda strip: strip.packets.count(" "))
    legend = "".join(f'<span><i class="p{kind}"></i>{meaning}</span>' for kind, meaning in _PACKETS.items())
    graphic = f'{packets(chosen.packets)}<div class="legend">{legend}</div>'
    return card("Packets of one sample", graphic, aside=summary.annotations["key"][chosen.sample].as_py())


def packets(kinds: str) -> str:
    """Draw packets as bars in decode order, their height by size. `kinds` is as in `FrameStrip.packets`."""
    found = [(part[0], int(part[1:])) for part in kinds.split()]
    # Key packets are ten times as large as others; square roots keep both visible.
    most = math.sqrt(max((number for _, number in found), default=1))
    parts = []
    for number, (kind, number_bytes) in enumerate(found):
        high = max(2.0, 100 * math.sqrt(number_bytes) / most)
        parts.append(
            f'<rect class="p{kind}" x="{10 * number + 1}" y="{100 - high:.1f}" width="8" height="{high:.1f}"'
            f' data-tip="packet {number}: {size(number_bytes)}, {_PACKETS[kind]}"/>'
        )
    return (
        f'<svg class="packets" viewBox="0 0 {10 * len(found)} 100" preserveAspectRatio="none" role="img"'
        f' aria-label="packets: {text(kinds)}">{"".join(parts)}</svg>'
    )


def _encoder(build: Mapping[str, Any]) -> str:
    """Describe an encoder build, for example ``ffmpeg 5.1.9, x264 core 164``."""
    parts = [f"{name} {build[key]}" for name, key in (("ffmpeg", "version"), ("x264", "x264")) if build.get(key)]
    return ", ".join(parts) or "not recorded"


def _profile(profile: Mapping[str, Any]) -> str:
    """Describe a profile, for example ``compact: bframes 7, codec h264, crf 23``."""
    if profile.get("codec") == "copy":
        return "copy: nothing is encoded"
    rest = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in sorted(profile.items()) if name != "name" and value != ""
    )
    name = str(profile.get("name", "not recorded"))
    return f"{name}: {rest}" if rest else name
