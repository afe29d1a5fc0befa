"""Wrap a clip in a minimal MP4 for decoders that only accept containers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.mp4 import minimal_mp4
from fastvid.decode.request import DecoderOutput, DeviceRgb, EncodedClip, Rgb
from fastvid.errors import DecodeError, UsageError
from fastvid.format.codecs.picture_size import declared_size
from fastvid.format.schema import Codec, Matrix, Range
from fastvid.runtime.arrays import IntArray

_BT601: Final = frozenset({Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN})

# Codecs whose packets state the picture size; in the others the extradata does.
_SELF_SIZED: Final = frozenset({Codec.VP9, Codec.MJPEG})


@dataclass(frozen=True, slots=True, eq=False)
class WrappedClip:
    """A clip wrapped in a container."""

    clip: EncodedClip
    mp4: bytes
    positions: npt.NDArray[np.int32]  # positions of the wanted frames in the container, sorted and unique, int32 [U]
    index: IntArray  # for each output frame its index into `positions`, int64 [T]

    @property
    def resized(self) -> bool:
        """Whether the crop is resized."""
        request = self.clip.request
        return (request.box.height, request.box.width) != request.size

    @property
    def in_order(self) -> bool:
        """Whether the output frames are the unique frames in container order."""
        return len(self.index) == len(self.positions) and bool((np.diff(self.index) > 0).all())


def wrap(clip: EncodedClip, decoder: str, codecs: Set[Codec]) -> WrappedClip:
    """Wrap a clip in a container, after checks that such decoders do not make."""
    info = clip.info
    if info.codec not in codecs:
        known = ", ".join(sorted(codec.label for codec in codecs))
        raise DecodeError(f"{decoder} decodes {known}, not {info.codec.label}", hint="use pyav")
    # JPEG pictures signal their range themselves.
    if info.matrix not in _BT601 or (info.range is Range.FULL and info.codec is not Codec.MJPEG):
        colour = f"{info.matrix.name.lower()} {info.range.name.lower()}"
        raise DecodeError(f"{decoder} converts by limited BT.601, the stream is {colour}", hint="use pyav")
    if not clip.keys[0]:
        raise DecodeError("first packet of the plan is not a key packet")
    for start, size in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True):
        if not size:
            raise DecodeError("packet is empty")
        found = declared_size(info.codec, clip.data[start : start + size]) if info.codec in _SELF_SIZED else None
        # DALI allocates memory by the container's size and writes past it if the pictures are larger.
        if found not in (None, (info.width, info.height)):
            raise DecodeError(f"packet has pictures of {found}, the stream of {(info.width, info.height)}")
    # Such decoders seek and decode again for a repeated frame, so request each frame once, in order.
    wanted, index = np.unique(clip.request.frames, return_inverse=True)
    shown = np.sort(clip.shows)
    positions = np.searchsorted(shown, wanted)
    if positions[-1] >= len(shown) or (shown[positions] != wanted).any():
        raise DecodeError("plan lacks the packets of some wanted frames")
    mp4 = minimal_mp4(info, clip.data, clip.starts, clip.sizes, clip.shows, clip.keys)
    return WrappedClip(clip, mp4, positions.astype(np.int32), index.astype(np.int64))


def check_target(clip: EncodedClip, output: DecoderOutput, allowed: Set[type]) -> Rgb | DeviceRgb:
    """Return the output after checking its type and shape."""
    if type(output) not in allowed or not isinstance(output, Rgb | DeviceRgb):
        names = " and ".join(sorted(kind.__name__ for kind in allowed))
        raise UsageError(f"the decoder writes {names}, not {type(output).__name__}")
    expected = (3, len(clip.request.frames), *clip.request.size)
    if tuple(output.data.shape) != expected:
        raise UsageError(f"output has shape {tuple(output.data.shape)}, the request requires {expected}")
    return output
