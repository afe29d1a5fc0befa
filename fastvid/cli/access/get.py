"""Write a sample to a file: the MP4 as stored, or a clip, a frame, a contact sheet or the sound of it.

Only the bytes of the sample are read, also from object stores, and they are checked. --seconds encodes its frames
again, visually lossless, with their sound; everything else is as stored or decoded. -o - writes to stdout.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import numpy as np

from fastvid.decode import video_dataset
from fastvid.decode.video import Video, clip_frames, encode_clip, encode_still
from fastvid.errors import UsageError
from fastvid.format.schema import StreamFlag
from fastvid.runtime.values import size, things

_LOG = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid get``."""
    parser.add_argument("dataset", metavar="DIR", help="folder or URL of the dataset")
    parser.add_argument("key", metavar="KEY", help="key of the sample")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="file to write; - is stdout")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seconds", metavar="START:STOP", help="an MP4 of the frames shown then, encoded again")
    what.add_argument("--frame", type=int, metavar="N", help="one frame: PNG, or JPEG if FILE ends in .jpg")
    what.add_argument("--sheet", action="store_true", help="a contact sheet as PNG")
    what.add_argument("--audio", action="store_true", help="the sound as stored, an M4A")
    parser.add_argument("--generation", type=int, metavar="N", help="number of the generation (default: the current)")


def run(args: argparse.Namespace) -> int:
    """Write the file and log what it is."""
    video = video_dataset.open(args.dataset, generation=args.generation)[args.key]
    data = _content(args, video)
    if args.out == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return 0
    try:
        Path(args.out).write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"cannot write the file: {error.strerror}", file=args.out, hint="choose a path that you can write"
        ) from error
    _LOG.info("%s: %s", args.out, size(len(data)))
    return 0


def _content(args: argparse.Namespace, video: Video) -> bytes:
    if args.seconds is not None:
        frames = clip_frames(video, *_range(args.seconds))
        _LOG.info("%s, %d to %d, encoded again", things(len(frames), "frame"), frames[0], frames[-1])
        return encode_clip(video, frames)
    if args.frame is not None:
        suffix = ".png" if args.out == "-" else Path(args.out).suffix.lower()
        return encode_still(video.frames([args.frame]).data[0], suffix)
    if video.info.flags & StreamFlag.PART and not args.sheet and not args.audio:
        _LOG.info("a part of a file that others share: encoded again")
        return encode_clip(video, np.arange(video.num_frames))
    return video.file(".png" if args.sheet else ".m4a" if args.audio else ".mp4")


def _range(text: str) -> tuple[float, float]:
    start, colon, stop = text.partition(":")
    try:
        if colon:
            return float(start), float(stop)
    except ValueError:
        pass
    raise UsageError(f"--seconds is {text!r}", hint="give START:STOP in seconds, such as 3.2:5.7")
