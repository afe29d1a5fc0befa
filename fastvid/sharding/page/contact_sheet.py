"""Makes contact sheets: strips of frames for some samples of every class, within a byte limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import FastvidError
from fastvid.format.dataset import Dataset
from fastvid.runtime.processes import available_cores
from fastvid.runtime.progress import Progress
from fastvid.sharding.page.summary import Summary
from fastvid.videos.pictures import encode_picture
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
_PROBES: Final = 8  # strips made to estimate the size of one


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
    left_out: int = 0  # number of classes with samples but without a strip, for lack of space


def make_contact_sheet(summary: Summary, *, max_bytes: int) -> ContactSheet:
    """Decode strips, a few of every class, as many as fit.

    `max_bytes`: maximum size of all URIs together. If it is small, strips get fewer frames, then classes get fewer
    strips, then small classes get none.
    """
    rows = _rows_by_class(summary)
    dataset = Dataset(summary.url, generation=summary.generation.number)

    def make(row: int, count: int) -> FrameStrip | None:
        return _strip(dataset, row, float(summary.seconds[row]), count)

    first = [samples[len(samples) // 2] for samples in rows.values()]
    frames = _frames_that_fit([make(row, _FRAMES[0]) for row in first[:_PROBES]], len(first), max_bytes)
    most = min(max(_TILES // max(len(rows), 1), _PER_CLASS[0]), _PER_CLASS[1])
    wanted = list(_round_robin([_spread(samples, most) for samples in rows.values()]))
    sheet, room = ContactSheet(), max_bytes
    names = summary.class_names
    progress = Progress(len(wanted), what="clips")
    with ThreadPoolExecutor(available_cores(), thread_name_prefix="contact") as pool:
        for row, strip in zip(wanted, pool.map(lambda row: make(row, frames), wanted), strict=True):
            progress.advance()
            if strip is None:
                sheet.failed += 1
            elif len(strip.uri) <= room:
                room -= len(strip.uri)
                sheet.strips.setdefault(names[row], []).append(strip)
            else:
                pool.shutdown(wait=True, cancel_futures=True)
                break
    progress.finish()
    sheet.strips = {name: sheet.strips[name] for name in rows if name in sheet.strips}
    sheet.left_out = len(rows) - len(sheet.strips)
    return sheet


def pick_frames(num_frames: int, seconds: float, count: int) -> npt.NDArray[np.int64]:
    """Return evenly spaced frames from the middle seconds of a video, int64 [min(count, num_frames)], ascending."""
    window = max(1, min(num_frames, round(num_frames * min(1.0, _WINDOW_SECONDS / max(seconds, 1e-9)))))
    count = min(count, num_frames)
    window = max(window, count)
    start = (num_frames - window) // 2
    picks: npt.NDArray[np.int64] = start + (np.arange(count) * 2 + 1) * window // (2 * count)
    return picks


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
    for row, name in enumerate(summary.class_names):
        rows[name].append(row)
    return rows


def _frames_that_fit(probes: Sequence[FrameStrip | None], classes: int, max_bytes: int) -> int:
    """Return the frames per strip, within limits, for which every class gets a strip."""
    sizes = [len(strip.uri) / strip.frames for strip in probes if strip is not None]
    if not sizes:
        return _FRAMES[0]
    return int(np.clip(max_bytes / (classes * float(np.mean(sizes))), _FRAMES[1], _FRAMES[0]))


def _spread(samples: Sequence[int], most: int) -> list[int]:
    """Return at most `most` samples, evenly spaced."""
    count = min(most, len(samples))
    return [samples[(2 * n + 1) * len(samples) // (2 * count)] for n in range(count)]


def _round_robin(lists: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the first of every list, then the second of every list, and so on, so that stopping early is fair."""
    for place in range(max(map(len, lists), default=0)):
        for items in lists:
            if place < len(items):
                yield items[place]
