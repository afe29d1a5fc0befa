"""A clip as decoders want it that only eat containers: a minimal MP4 and the positions of the wanted frames in it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.request import DeviceRgb, EncodedClip, Output, Rgb
from fastvid.errors import DecodeError, UsageError
from fastvid.format.mp4 import minimal_mp4
from fastvid.format.picture_size import declared_size
from fastvid.format.schema import Codec, Matrix, Range
from fastvid.runtime.arrays import IntArray

_BT601: Final = frozenset({Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN})

# Their packets say how large their pictures are; for the others the extradata does.
_SELF_SIZED: Final = frozenset({Codec.VP9, Codec.MJPEG})


@dataclass(frozen=True, slots=True, eq=False)
class WrappedClip:
    """A clip in a container.

    Attributes:
        clip: The clip.
        mp4: Its packets in a minimal MP4.
        positions: Which of the container's frames are wanted, sorted and unique, int32 [U].
        index: Which of those stands at each place of the output, int64 [T].
    """

    clip: EncodedClip
    mp4: bytes
    positions: npt.NDArray[np.int32]
    index: IntArray

    @property
    def resized(self) -> bool:
        """Whether the crop is resized."""
        request = self.clip.request
        return (request.box.height, request.box.width) != request.size

    @property
    def in_order(self) -> bool:
        """Whether the output is the unique frames as they come."""
        return len(self.index) == len(self.positions) and bool((np.diff(self.index) > 0).all())


def wrap(clip: EncodedClip, decoder: str, codecs: Set[Codec]) -> WrappedClip:
    """Puts a clip into a container, after the checks that such decoders do not make.

    Args:
        clip: The clip.
        decoder: Who will decode it, for messages.
        codecs: What that decoder decodes.

    Raises:
        DecodeError: The decoder does not decode the stream, or would not decode it rightly; the packets and what is
            said of them contradict each other.
        FormatError: The stream does not fit into a minimal MP4.
    """
    info = clip.info
    if info.codec not in codecs:
        known = ", ".join(sorted(codec.label for codec in codecs))
        raise DecodeError(f"{decoder} decodes {known}, not {info.codec.label}", hint="use pyav")
    # JPEG pictures say their range themselves.
    if info.matrix not in _BT601 or (info.range is Range.FULL and info.codec is not Codec.MJPEG):
        colour = f"{info.matrix.name.lower()} {info.range.name.lower()}"
        raise DecodeError(f"{decoder} converts by limited BT.601, the stream is {colour}", hint="use pyav")
    if not clip.keys[0]:
        raise DecodeError("the first packet of a plan must be a key packet")
    for start, size in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True):
        if not size:
            raise DecodeError("a packet is empty")
        found = declared_size(info.codec, clip.data[start : start + size]) if info.codec in _SELF_SIZED else None
        # DALI writes pictures into memory of the promised size, whatever theirs is.
        if found not in (None, (info.width, info.height)):
            raise DecodeError(f"a packet's pictures are {found}, the stream's {(info.width, info.height)}")
    # For a repeated frame such decoders seek and decode again, so each is asked for once, in order.
    wanted, index = np.unique(clip.request.frames, return_inverse=True)
    shown = np.sort(clip.shows)
    positions = np.searchsorted(shown, wanted)
    if positions[-1] >= len(shown) or (shown[positions] != wanted).any():
        raise DecodeError("wanted frames are shown by no packet of the plan")
    mp4 = minimal_mp4(info, clip.data, clip.starts, clip.sizes, clip.shows, clip.keys)
    return WrappedClip(clip, mp4, positions.astype(np.int32), index.astype(np.int64))


def check_target(clip: EncodedClip, output: Output, allowed: Set[type]) -> Rgb | DeviceRgb:
    """The output, when it is one that the decoder writes and fits the request.

    Raises:
        UsageError: It is of another kind or shape.
    """
    if type(output) not in allowed or not isinstance(output, Rgb | DeviceRgb):
        names = " and ".join(sorted(kind.__name__ for kind in allowed))
        raise UsageError(f"the decoder writes {names}, not {type(output).__name__}")
    expected = (3, len(clip.request.frames), *clip.request.size)
    if tuple(output.data.shape) != expected:
        raise UsageError(f"output has shape {tuple(output.data.shape)}, the request gives {expected}")
    return output
