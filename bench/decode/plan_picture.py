"""Draw the README's picture: the packets needed to decode eight frames of a video, with and without a plan.

python -m bench.decode.plan_picture > docs/images/plan.svg
python -m bench.decode.plan_picture dark > docs/images/plan-dark.svg

The picture shows a packet table of the profile ``compact`` and the loader's plan for it.
"""

from __future__ import annotations

import itertools
import sys
from typing import Final

import numpy as np

from fastvid.format.packets import PacketTable, packet_records
from fastvid.format.schema import PacketFlag
from fastvid.load.clips.sampling import Segments, VideoInfo

NUM_FRAMES: Final = 96
# GOP of the profile compact: a key frame; after it every eighth frame and the last one are references.
_GOP: Final = 32
_EVERY: Final = 8
_WANTED: Final = 8
_LEFT, _STEP, _BAR = 20.0, 8.5, 6.5
_HEIGHTS: Final = {"key": 46.0, "reference": 32.0, "other": 20.0}
_BASES: Final = (112.0, 222.0)  # y of the two rows' bases
_SIZE: Final = (856, 276)
# Colours of the paper, its edge, text, small text, packets that are left out, and packets that are decoded.
THEMES: Final = {
    "light": ("#ffffff", "#e3e6eb", "#1b1f24", "#68707c", "#dde1e7", "#c8553d", "#0b6e4f"),
    "dark": ("#22262f", "#3a4150", "#e6e9ef", "#a3acb9", "#3f4757", "#ef8a72", "#4cc49a"),
}


def table() -> PacketTable:
    """Return the packets of three GOPs in decode order: each reference precedes the frames before it."""
    frames: list[int] = []
    flags: list[int] = []
    for start in range(0, NUM_FRAMES, _GOP):
        references = [*range(start, start + _GOP, _EVERY), start + _GOP - 1]
        frames.append(start)
        flags.append(PacketFlag.KEY)
        for before, reference in itertools.pairwise(references):
            between = range(before + 1, reference)
            frames += [reference, *between]
            flags += [0, *[PacketFlag.DROPPABLE] * len(between)]
    count = len(frames)
    return PacketTable(packet_records(np.arange(count), np.ones(count), np.zeros(count), frames, flags))


def svg(theme: str = "light") -> str:
    """Return the picture as SVG, in the colours of one of `THEMES`."""
    paper, edge, ink, muted, idle, red, green = THEMES[theme]
    packets = table()
    wanted = Segments(_WANTED, jitter=False).spread(VideoInfo(NUM_FRAMES, 25.0, 1, 1), 1)[0]
    plan = packets.plan(wanted)
    shown, flags = packets.records["frame"], packets.records["flags"]
    planned = {int(frame) for frame in shown[plan.packets]}
    place = {int(frame): row for row, frame in enumerate(shown)}
    unplanned: set[int] = set()
    for start in range(0, NUM_FRAMES, _GOP):
        ends = [place[int(frame)] for frame in wanted if start <= frame < start + _GOP]
        unplanned |= {int(frame) for frame in shown[place[start] : max(ends, default=place[start] - 1) + 1]}
    assert len(unplanned) == plan.packets_from_keys
    kinds = {
        int(frame): "key" if flag & PacketFlag.KEY else "other" if flag & PacketFlag.DROPPABLE else "reference"
        for frame, flag in zip(shown, flags, strict=True)
    }
    width, height = _SIZE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="14">',
        f'<rect width="{width}" height="{height}" rx="10" fill="{paper}" stroke="{edge}"/>',
    ]
    rows = (
        ("Without a plan: from the key frame to each wanted frame", unplanned, red),
        ("With a plan: what fastvid reads and decodes for the same pixels", planned, green),
    )
    for base, (title, fed, colour) in zip(_BASES, rows, strict=True):
        parts.append(f'<text x="{_LEFT}" y="{base - 66}" fill="{ink}" font-weight="600">{title}</text>')
        says = f"{len(fed)} of {NUM_FRAMES} packets"
        parts.append(f'<text x="{width - _LEFT}" y="{base - 66}" fill="{colour}" text-anchor="end">{says}</text>')
        for frame in range(NUM_FRAMES):
            tall, x = _HEIGHTS[kinds[frame]], _LEFT + _STEP * frame
            fill = colour if frame in fed else idle
            parts.append(f'<rect x="{x}" y="{base - tall}" width="{_BAR}" height="{tall}" rx="1" fill="{fill}"/>')
        for frame in wanted:
            x = _LEFT + _STEP * int(frame) + _BAR / 2
            parts.append(f'<path d="M{x} {base + 5}l4 7h-8z" fill="{ink}"/>')
    legend = (
        "Tall bars: key frames. Medium: reference frames. Short: frames nothing refers to. Triangles: wanted frames."
    )
    parts.append(f'<text x="{_LEFT}" y="{height - 20}" fill="{muted}" font-size="12.5">{legend}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(svg(*sys.argv[1:]))
