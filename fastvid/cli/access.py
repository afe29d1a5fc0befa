"""``fastvid find`` and ``get``: where samples are, and what they contain as a file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fastvid.cli.command import exclusive, forwards, write_file
from fastvid.errors import UsageError, visible
from fastvid.format.schema import StreamFlag
from fastvid.runtime.values import json_text, size, things
from fastvid.videos import dataset as datasets
from fastvid.videos.video import Video, clip_frames, encode_clip, encode_still

_LOG = logging.getLogger(__name__)


@exclusive("source", "where")
@forwards(datasets.find_samples)
def find(dataset: str, text: str | None = None, *, json: bool = False, **options: Any) -> int:
    """Show where samples are: shard, row, bytes in the tar, source, class, and whether they were removed.

    KEY is a key or a part of keys or source names. --source lists all samples of a source file; --where prints the keys
    of the samples that a condition selects.

    Args:
        dataset (DIR): Folder or URL of the dataset.
        text (KEY): A key, or a part of keys or source names.
        source (NAME): All samples of a source.
        where (SQL): Keys of samples, such as "class = 'archery'".
        generation (N): Number of the generation (default: the current).
        json: One JSON object per sample and line.
    """
    found = datasets.find_samples(dataset, text, **options)
    for number, sample in enumerate(found):
        if json:
            print(json_text(sample, default=str))
        elif options["where"] is not None:
            print(sample["key"])
        else:
            lines = [visible(f"{name:14} {value}") for name, value in sample.items() if value is not None]
            print("\n" * (number > 0) + "\n".join(lines))
    return 0


@exclusive("seconds", "frame", "sheet", "audio")
def get(
    dataset: str,
    key: str,
    *,
    out: str,
    seconds: str | None = None,
    frame: int | None = None,
    sheet: bool = False,
    audio: bool = False,
    generation: int | None = None,
) -> int:
    """Write a sample to a file: the video as stored, or its sound, a clip, a frame or a contact sheet.

    Only the bytes of the sample are read, also from object stores, and they are checked. --seconds encodes its frames
    again, visually lossless, with their sound; everything else is as stored or decoded. -o - writes to stdout.

    Args:
        dataset (DIR): Folder or URL of the dataset.
        key (KEY): Key of the sample.
        out (-o FILE): File to write; - is stdout. One in .png, .html or .m4a gets what `Video.save` writes there.
        seconds (START:STOP): An MP4 of the frames shown between these seconds, encoded again.
        frame (N): One frame: PNG, or JPEG if FILE ends in .jpg.
        sheet: A contact sheet as PNG.
        audio: The sound as stored, an M4A.
        generation (N): Number of the generation (default: the current).
    """
    video = datasets.open(dataset, generation=generation)[key]
    if seconds is not None:
        frames = clip_frames(video, *_range(seconds))
        _LOG.info("%s, %d to %d, encoded again", things(len(frames), "frame"), frames[0], frames[-1])
        data = encode_clip(video, frames)
    elif frame is not None:
        suffix = ".png" if out == "-" else Path(out).suffix.lower()
        data = encode_still(video.frames([frame]).data[0], suffix)
    else:
        kind = ".png" if sheet else ".m4a" if audio else Path(out).suffix.lower()
        data = video.file(kind) if kind in (".png", ".html", ".m4a") else _whole(video, kind)
    if out == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return 0
    write_file(out, data, "file")
    _LOG.info("%s: %s", out, size(len(data)))
    return 0


def _whole(video: Video, suffix: str) -> bytes:
    """Return all frames of a sample as a file, as stored if they have a file of their own that `suffix` can name."""
    if video.info.flags & StreamFlag.PART:
        _LOG.info("the sample is a part of a file with other samples: it is encoded again")
    elif suffix == ".mp4" and not video.is_stored_as(suffix):
        _LOG.info("the sample is a %s file: it is encoded again; use -o FILE%s to copy it", video.suffix, video.suffix)
    else:
        return video.file(video.suffix)
    return encode_clip(video, np.arange(video.num_frames))


def _range(text: str) -> tuple[float, float]:
    start, colon, stop = text.partition(":")
    try:
        if colon:
            return float(start), float(stop)
    except ValueError:
        pass
    raise UsageError(f"--seconds is {text!r}", hint="give START:STOP in seconds, such as 3.2:5.7")
