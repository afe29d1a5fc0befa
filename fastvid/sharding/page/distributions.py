"""The page's distributions and what it says of the encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fastvid.runtime.units import axis_bytes, axis_seconds, count, duration, percent, shares, size
from fastvid.sharding.page.charts import bars, card, definitions, histogram, packets
from fastvid.sharding.page.contact_sheet import ContactSheet
from fastvid.sharding.page.summary import Summary

_PACKETS: Final = {
    "k": "key: decoding starts here",
    "r": "others refer to it",
    "d": "nothing refers to it: left out unless its frame is wanted",
}


def shapes_section(summary: Summary) -> str:
    """Durations, bytes, sizes and rates."""
    if not summary.num_samples:
        return ""
    per_clip = summary.bytes.astype(np.float64)
    cards = (
        ("Duration", "seconds of each sample", histogram(summary.seconds, duration, axis_seconds, what="samples")),
        ("Bytes", "encoded video of each sample", histogram(per_clip, size, axis_bytes, what="samples")),
        ("Frame size", "width x height in pixels", bars(summary.sizes)),
        ("Frame rate", "frames a second", bars(summary.rates)),
    )
    listed = "".join(card(title, sub, chart) for title, sub, chart in cards)
    return (
        '<section id="shapes"><h2>Distributions</h2><p class="lead">Over all visible samples.</p>'
        f'<div class="grid">{listed}</div></section>'
    )


def encoding_section(summary: Summary, sheet: ContactSheet) -> str:
    """Packets of one sample, the profile, and the generations."""
    if not summary.num_samples:
        return ""
    shard = summary.generation.shards[0]
    video = {
        "packets per key frame": f"{summary.packets_per_key:.1f}",
        "droppable packets": percent(summary.droppable_share, 1),
        "codec": shares(summary.codecs),
        "colour": shares(summary.colours),
        "bit rate": f"{8 * summary.bytes.sum() / max(float(summary.seconds.sum()), 1e-9) / 1000:.0f} kbit/s",
        "decoded whole": count(summary.whole),
        "profile": _profile(shard.profile),
        "encoder": _encoder(shard.encoder),
    }
    past = {f"generation {number}": note or "-" for number, note in summary.history}
    return (
        '<section id="encoding"><h2>Encoding</h2>'
        '<p class="lead">How samples are built, and what a training clip has to decode.</p>'
        f'{_packets_of_one(summary, sheet)}<div class="grid">{card("Video", "", definitions(video))}'
        f"{card('History', 'generations that can be opened', definitions(past))}</div></section>"
    )


def _packets_of_one(summary: Summary, sheet: ContactSheet) -> str:
    strips = [strip for found in sheet.strips.values() for strip in found]
    if not strips:
        return ""
    # The first one with enough packets to show the pattern.
    chosen = max(strips, key=lambda strip: strip.packets.count(" "))
    legend = "".join(f'<span><i class="p{kind}"></i>{meaning}</span>' for kind, meaning in _PACKETS.items())
    graphic = f'{packets(chosen.packets)}<div class="legend">{legend}</div>'
    return card("Packets of one sample", summary.annotations["key"][chosen.sample].as_py(), graphic)


def _encoder(build: Mapping[str, Any]) -> str:
    """Such as ``ffmpeg 5.1.9, x264 core 164``."""
    parts = [f"{name} {build[key]}" for name, key in (("ffmpeg", "version"), ("x264", "x264")) if build.get(key)]
    return ", ".join(parts) or "not recorded"


def _profile(profile: Mapping[str, Any]) -> str:
    """Such as ``compact: bframes 7, codec h264, crf 23``."""
    if profile.get("codec") == "copy":
        return "copy: nothing is encoded"
    rest = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in sorted(profile.items()) if name != "name")
    name = str(profile.get("name", "not recorded"))
    return f"{name}: {rest}" if rest else name
