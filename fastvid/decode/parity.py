"""Compare a machine's back-ends on the same clips: frame accuracy, colour difference and speed.

A decoder on a device can fail without an error: its pictures are black, were never written, belong to the clip before
or to a neighbouring frame, or have channels or rows in the wrong order. So outputs are first filled with a level that
no picture of the clips consists of, every decoded frame is compared with all frames of the clip, and its difference
from the right one must be within the bound that its back-end states.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.request import Box, ClipRequest, Decoder, DecoderOutput, DevicePlanes, DeviceRgb, Rgb
from fastvid.errors import FastvidError
from fastvid.format.mp4 import index_mp4
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import StreamFlag
from fastvid.runtime.arrays import IntArray, UInt8Array

REFERENCE: Final = "pyav"
"""The back-end to compare with: it decodes every codec, and tests compare it with ffmpeg bit by bit."""

_FRAMES: Final = 8  # decoded in each comparison
# A frame is wrong if another frame of the clip is closer to it by more than this many levels.
_NEARER: Final = 0.2
# Only every third row and column are compared to find the nearest frame: a ninth of the pixels is enough.
_STEP: Final = 3
_UNWRITTEN: Final = 0x5A


@dataclass(frozen=True, slots=True)
class Parity:
    """The comparison of one back-end with the reference on one clip."""

    clip: str  # name of the clip
    range: str  # of its samples: limited, full or unknown
    backend: str
    frames: bool | None  # whether it returned the requested frames within its bound; None if it failed
    mean: float  # largest mean difference of a frame, in levels
    most: int  # largest difference of a pixel, in levels
    rate: float  # clips per second of one open, warm decoder
    problem: str | None = None


class SampleClip:
    """An MP4 in memory, and the frames of it to compare.

    `data`: the file's bytes. `indexed`: its stream and packets, if they are known.
    """

    def __init__(self, name: str, data: bytes, indexed: tuple[StreamInfo, PacketTable] | None = None) -> None:
        self.name = name
        if indexed is None:
            info, records = index_mp4(data)
            indexed = info, PacketTable(records, whole=bool(info.flags & StreamFlag.WHOLE))
        self.info, self.table = indexed
        self._read = reader_of(data)
        # One frame of each eighth of the clip, never the first: a back-end that ignores the request returns that.
        self.frames = (np.arange(_FRAMES) * self.info.num_frames // _FRAMES + 1).astype(np.int64)

    def decode(self, decoder: Decoder, device: str, frames: IntArray) -> UInt8Array:
        """Decode frames to uint8 [3, T, H, W] on the host. Pixels that the decoder does not write have the level 90."""
        size = (self.info.height & ~1, self.info.width & ~1)
        request = ClipRequest(0, frames, Box(0, 0, *size), size)
        clip = read_clip(request, self.info, self.table, self._read)
        output = _filled(decoder.outputs, (len(frames), *size), device)
        (error,) = decoder.decode([clip], [output])
        if error is not None:
            raise error
        return self._pictures(output)

    def _pictures(self, output: DecoderOutput) -> UInt8Array:
        if isinstance(output, Rgb):
            return output.data
        if isinstance(output, DeviceRgb):
            rgb: UInt8Array = output.data.cpu().numpy()
            return rgb
        from fastvid.decode.colours import ClipPlanes
        from fastvid.decode.pixels import clip_to_rgb

        assert isinstance(output, DevicePlanes)
        y, uv = output.y.cpu(), output.uv.cpu()
        planes = ClipPlanes(y, uv[..., 0], uv[..., 1], matrix=self.info.matrix, range=self.info.range)
        converted: UInt8Array = clip_to_rgb(planes, (y.shape[1], y.shape[2])).numpy()
        return converted


def _filled(kinds: Set[type], shape: tuple[int, int, int], device: str) -> DecoderOutput:
    """Return an output of the first type that a decoder writes, for frames [T, H, W], filled with the level 90."""
    t, h, w = shape
    if Rgb in kinds:
        return Rgb(np.full((3, *shape), _UNWRITTEN, np.uint8))
    import torch

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, _UNWRITTEN, dtype=torch.uint8, device=device)

    if DeviceRgb in kinds:
        output: DecoderOutput = DeviceRgb(full(3, t, h, w))
    else:
        output = DevicePlanes(full(t, h, w), full(t, h // 2, w // 2, 2))
    if device != "cpu":
        # The decoder writes on a stream of its own, after this one has filled the output.
        torch.cuda.current_stream(device).synchronize()
    return output


@dataclass(frozen=True, slots=True)
class Verdict:
    """How much decoded frames differ from the reference."""

    mean: float  # largest mean difference of a frame, in levels
    most: int  # largest difference of a pixel, in levels
    problem: str | None  # what is wrong, None if nothing is


def judge(pictures: UInt8Array, frames: IntArray, every: UInt8Array, bound: float) -> Verdict:
    """Compare decoded frames with all frames of their clip.

    `pictures`: decoded frames, uint8 [3, T, H, W]. `frames`: their indices, int64 [T]. `every`: all frames of the
    clip as the reference decodes them, uint8 [3, N, H, W]. `bound`: largest allowed mean difference, in levels.
    """
    worst, most, problem = 0.0, 0, None
    thumbs = every[..., ::_STEP, ::_STEP].astype(np.int16)
    for place, frame in enumerate(frames.tolist()):
        picture = pictures[:, place]
        difference = np.abs(picture.astype(np.int16) - every[:, frame])
        mean = float(difference.mean())
        worst, most = max(worst, mean), max(most, int(difference.max()))
        if problem is not None:
            continue
        off = np.abs(picture[:, None, ::_STEP, ::_STEP].astype(np.int16) - thumbs).mean(axis=(0, 2, 3))
        nearest = int(off.argmin())
        if mean > bound:
            problem = f"frame {frame} differs by {mean:.1f} levels on average, at most {bound:g} are allowed"
        elif off[nearest] < off[frame] - _NEARER:
            problem = f"frame {frame} looks like frame {nearest}"
    return Verdict(worst, most, problem)


def compare(clips: Iterable[SampleClip], chosen: Iterable[Backend], *, seconds: float = 0.2) -> list[Parity]:
    """Compare every back-end with the reference, on every clip whose codec it supports.

    `seconds`: how long to measure the speed of each on a clip.
    """
    chosen = list(chosen)
    reference = next(one for one in chosen if one.name == REFERENCE).open()
    found = []
    for clip in clips:
        every = clip.decode(reference, "cpu", np.arange(clip.info.num_frames))
        found += [_one(clip, one, every, seconds) for one in chosen if clip.info.codec in one.codecs]
    reference.close()
    return found


def _one(clip: SampleClip, one: Backend, every: UInt8Array, seconds: float) -> Parity:
    sample_range = clip.info.range.name.lower()
    try:
        decoder = one.open()
        # Twice, in different order: pictures left over from the last call would be right for the same request.
        verdicts = [
            judge(clip.decode(decoder, one.device, frames), frames, every, one.bound)
            for frames in (clip.frames, clip.frames[::-1].copy())
        ]
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
    problem = next((verdict.problem for verdict in verdicts if verdict.problem is not None), None)
    mean, most = max(verdict.mean for verdict in verdicts), max(verdict.most for verdict in verdicts)
    return Parity(clip.name, sample_range, one.name, problem is None, mean, most, rate, problem)
