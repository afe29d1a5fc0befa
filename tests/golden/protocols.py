"""Digests of the clips and crops of a video that an evaluation averages, by protocol name.

Recorded from the trainer. Crops are compared as a set: their average does not depend on their order, and the trainer
and `fastvid.Views` order five and ten crops differently.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fastvid
from tests.golden import seams
from tests.golden.golden import Sha

NAME = "protocols"

# Each dense clip with each number of frames: 13 protocols, 5 samplers, 300 lengths.
DENSE = (
    fastvid.Dense(4, 8, jitter=False),
    fastvid.Dense(8, 4, jitter=False),
    fastvid.Dense(16, 2, jitter=False, short="clamp"),
    fastvid.Dense(8, 8, jitter=False, short="clamp"),
    fastvid.Dense(32, 2, jitter=False),
)
SEGMENTS = (
    fastvid.Segments(3, jitter=False, length=2),
    fastvid.Segments(4, jitter=False),
    fastvid.Segments(8, jitter=False),
    fastvid.Segments(16, jitter=False),
)
LENGTHS = range(1, 301)
# Of the crop; and a side that replaces the crop's, as --size does.
CROPS: tuple[tuple[Any, int | None], ...] = (
    (fastvid.CenterCrop(224), None),
    (fastvid.CenterCrop(224, short_side=256), None),
    (fastvid.CenterCrop(224, short_side=256), 256),
    (fastvid.CenterCrop((112, 176), short_side=128), None),
    (fastvid.CenterCrop(48), 64),
)
SIDES = (16, 48, 144, 226, 240, 256, 258, 320, 340, 344, 456, 1080)
PROTOCOLS = (
    *("1x1", "2x1", "4x1", "5x1", "7x1", "30x1", "1x3", "1x5", "1x10"),
    *("2x3", "10x3", "4x5", "3x10", "twice", "twicex3"),
)
OF_SEGMENTS = ("twice", "twicex3")
"""Protocols that `Views` does not support yet; dense clips have no such protocol."""


def digests(
    protocol: str,
    clips: Callable[[Any, Any], Any],
    crops: Callable[[Any, int | None, int, int], list[tuple[int, ...]]],
) -> dict[str, str]:
    """Return the digests of a protocol, given functions for its clips and crops."""
    made = {}
    for name, samplers in (("dense", DENSE), ("segments", SEGMENTS)):
        if name == "dense" and protocol in OF_SEGMENTS:
            continue
        shown = Sha()
        for sampler in samplers:
            shown.add(*clips(sampler, LENGTHS))
        made[name] = str(shown)
    boxes = Sha()
    for crop, size in CROPS:
        for height in SIDES:
            for width in SIDES:
                boxes.add(sorted(crops(crop, size, height, width)))
    return {**made, "crops": str(boxes)}


def by_trainer(protocol: str) -> dict[str, str]:
    """Return the digests of the trainer's views."""
    return digests(
        protocol,
        lambda sampler, lengths: seams.trainer_clips(protocol, sampler, lengths),
        lambda *crop: seams.trainer_crops(protocol, *crop),
    )


def by_loader(protocol: str) -> dict[str, str]:
    """Return the digests of the loader's views."""
    clips, crops = map(int, protocol.split("x"))
    views = fastvid.Views(clips, crops)

    def cut(crop: Any, size: int | None, height: int, width: int) -> list[tuple[int, ...]]:
        other = crop if size is None else fastvid.CenterCrop(size, crop.short_side)
        return seams.loader_crops(views, other, height, width)

    return digests(protocol, lambda sampler, lengths: seams.loader_clips(views, sampler, lengths), cut)


def cases(_folder: Path) -> Mapping[str, Callable[[], Any]]:
    """Return a function for each digest by name."""
    return {protocol: lambda protocol=protocol: by_trainer(protocol) for protocol in PROTOCOLS}
