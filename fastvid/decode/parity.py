"""Compare a machine's back-ends on the same clips: frame accuracy, colour difference and speed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.backends import Backend
from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.request import Box, ClipRequest, Decoder, DeviceRgb, Output, Rgb
from fastvid.errors import FastvidError
from fastvid.format.demux import index_mp4
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import StreamFlag
from fastvid.runtime.arrays import IntArray, UInt8Array

REFERENCE: Final = "pyav"
"""The back-end to compare with: it decodes every codec, and tests compare it with ffmpeg bit by bit."""

_FRAMES: Final = 8
# A frame is wrong if the previous or next reference frame is closer to it by more than this many levels.
_NEARER: Final = 0.2


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of one back-end on one clip.

    Attributes:
        clip: The clip's name.
        range: The clip's sample range, "limited" or "full".
        backend: The back-end's name.
        frames: Whether it returned the requested frames; None if it failed.
        mean: Mean difference from the reference in levels.
        most: Maximum difference from the reference in levels.
        rate: Clips per second of one open, warm decoder.
        problem: Why it failed, or None.
    """

    clip: str
    range: str
    backend: str
    frames: bool | None
    mean: float
    most: int
    rate: float
    problem: str | None = None


class SampleClip:
    """An MP4 in memory.

    Args:
        name: A name for reports.
        data: The file's bytes.
        indexed: Its stream and packets, if known; by default the file is indexed.

    Raises:
        FormatError: If the file cannot be indexed.
    """

    def __init__(self, name: str, data: bytes, indexed: tuple[StreamInfo, PacketTable] | None = None) -> None:
        self.name = name
        if indexed is None:
            info, records = index_mp4(data)
            indexed = info, PacketTable(records, whole=bool(info.flags & StreamFlag.WHOLE))
        self.info, self.table = indexed
        self._read = reader_of(data)
        # One frame of each eighth of the clip, but not the first, to detect a back-end that ignores the request.
        self.frames = (np.arange(_FRAMES) * self.info.num_frames // _FRAMES + 1).astype(np.int64)

    def decode(self, decoder: Decoder, device: str, frames: IntArray) -> UInt8Array:
        """Decode frames to uint8 [3, T, H, W] on the host.

        Raises:
            FastvidError: If decoding failed.
        """
        size = (self.info.height & ~1, self.info.width & ~1)
        request = ClipRequest(0, frames, Box(0, 0, *size), size)
        clip = read_clip(request, self.info, self.table, self._read)
        shape = (3, len(frames), *size)
        output: Output
        if Rgb in decoder.outputs:
            output = Rgb(np.empty(shape, np.uint8))
        else:
            import torch

            output = DeviceRgb(torch.empty(shape, dtype=torch.uint8, device=device))
        (error,) = decoder.decode([clip], [output])
        if error is not None:
            raise error
        pictures: UInt8Array = output.data if isinstance(output, Rgb) else output.data.cpu().numpy()
        return pictures


def compare(clips: Iterable[SampleClip], chosen: Iterable[Backend], *, seconds: float = 0.2) -> list[Parity]:
    """Compare every back-end with the reference on every clip whose codec it supports.

    Args:
        clips: The clips.
        chosen: Back-ends that run on this machine, including the reference.
        seconds: How long to measure the speed of each.
    """
    chosen = list(chosen)
    reference = next(one for one in chosen if one.name == REFERENCE).open()
    found = []
    for clip in clips:
        shifted = [
            clip.decode(reference, "cpu", np.clip(clip.frames + shift, 0, clip.info.num_frames - 1)).astype(np.int16)
            for shift in (0, -1, 1)
        ]
        found += [_one(clip, one, shifted, seconds) for one in chosen if clip.info.codec in one.codecs]
    reference.close()
    return found


def _one(clip: SampleClip, one: Backend, shifted: list[npt.NDArray[np.int16]], seconds: float) -> Parity:
    sample_range = clip.info.range.name.lower()
    try:
        decoder = one.open()
        pictures = clip.decode(decoder, one.device, clip.frames).astype(np.int16)
        exact, before, after = (np.abs(pictures - wanted).mean(axis=(0, 2, 3)) for wanted in shifted)
        right = bool((np.minimum(before, after) >= exact - _NEARER).all())
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            clip.decode(decoder, one.device, clip.frames)
            count += 1
        rate = count / (time.perf_counter() - begun)
        decoder.close()
    except FastvidError as error:
        return Parity(clip.name, sample_range, one.name, None, 0.0, 0, 0.0, error.message)
    except Exception as error:  # noqa: BLE001 - third-party back-ends may raise any exception
        return Parity(clip.name, sample_range, one.name, None, 0.0, 0, 0.0, f"{type(error).__name__}: {error}")
    most = int(np.abs(pictures - shifted[0]).max())
    return Parity(clip.name, sample_range, one.name, right, float(exact.mean()), most, rate)
