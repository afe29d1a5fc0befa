"""What goes into a decoder and what comes out: value objects that check their own shapes.

Shape letters: T frames of a clip, H and W output size, h and w crop size, P packets fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import INPUT_PADDING
from fastvid.runtime.arrays import BoolArray, FloatArray, IntArray, UInt8Array


@dataclass(frozen=True, slots=True)
class Box:
    """A crop in pixels of the stream. All four are even, so that luma and chroma are cut at the same place."""

    y: int
    x: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if self.y < 0 or self.x < 0 or self.height <= 0 or self.width <= 0:
            raise UsageError(f"crop {self} has a negative corner or no area")
        if (self.y | self.x | self.height | self.width) & 1:
            raise UsageError(f"crop {self} has an odd side or corner", hint="4:2:0 frames are cut at even pixels")


@dataclass(frozen=True, slots=True, eq=False)
class ClipRequest:
    """One clip, decided to the last pixel. Decoders are pure functions of it.

    Attributes:
        sample: Row of the sample in its dataset.
        frames: Frame indices in display order, int64 [T]; any order, repeats allowed.
        box: Crop, inside the stream.
        size: Output height and width in pixels; equal to the box when nothing is resized.
        flip: Mirror left and right after the crop.
        stream: Which video stream of the sample.
    """

    sample: int
    frames: IntArray
    box: Box
    size: tuple[int, int]
    flip: bool = False
    stream: str = "rgb"

    def __post_init__(self) -> None:
        if self.frames.ndim != 1 or not len(self.frames) or self.frames.dtype != np.int64:
            raise UsageError(f"frames must be int64 [T] with T > 0, got {self.frames.dtype} {self.frames.shape}")
        if min(self.size) <= 0:
            raise UsageError(f"output size {self.size} must be positive")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedClip:
    """A request with the packets that decode it, checked against their checksums.

    Attributes:
        request: What is wanted.
        info: The stream.
        data: The planned packets' bytes, with at least 64 zero bytes behind the last packet; not to be written while
            a decoder reads it, which it does until its `decode` returns.
        starts: Where each packet starts in `data`, int64 [P], decode order.
        sizes: Bytes of each packet, int64 [P].
        shows: Frame index that each packet shows, -1 for none, int64 [P].
        keys: Whether decoding may start at the packet, bool [P].
        key: The sample's key, for messages.
        shard: The shard's name, for messages.
    """

    request: ClipRequest
    info: StreamInfo
    data: memoryview
    starts: IntArray
    sizes: IntArray
    shows: IntArray
    keys: BoolArray
    key: str = ""
    shard: str = ""

    def __post_init__(self) -> None:
        box, info = self.request.box, self.info
        if box.y + box.height > info.height or box.x + box.width > info.width:
            raise UsageError(f"crop {box} leaves the {info.width}x{info.height} stream", key=self.key)
        if not len(self.starts) == len(self.sizes) == len(self.shows) == len(self.keys) > 0:
            raise UsageError("starts, sizes, shows and keys must have one entry a packet", key=self.key)
        if int(np.maximum.reduce(self.starts + self.sizes)) + INPUT_PADDING > len(self.data):
            raise UsageError(f"packet data must end with {INPUT_PADDING} spare bytes", key=self.key)

    def __reduce__(self) -> tuple[object, ...]:
        # Views of memory do not pickle, and clips travel to worker processes.
        parts = (self.starts, self.sizes, self.shows, self.keys, self.key, self.shard)
        return _from_bytes, (self.request, self.info, bytes(self.data), *parts)

    def fail(self, message: str, *, hint: str | None = None, **where: object) -> DecodeError:
        """A DecodeError that says which clip it is about."""
        return DecodeError(message, hint=hint, shard=self.shard or None, key=self.key or None, **where)


def _from_bytes(request: ClipRequest, info: StreamInfo, data: bytes, *parts: Any) -> EncodedClip:
    return EncodedClip(request, info, memoryview(data), *parts)


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """Where a decoder puts cropped YUV 4:2:0 frames: 1.5 bytes a pixel, neither resized nor flipped.

    Attributes:
        y: uint8 [T, h, w].
        u: uint8 [T, h/2, w/2].
        v: uint8 [T, h/2, w/2].
    """

    y: UInt8Array
    u: UInt8Array
    v: UInt8Array

    def __post_init__(self) -> None:
        t, h, w = self.y.shape
        if self.u.shape != (t, h // 2, w // 2) or self.v.shape != self.u.shape:
            raise UsageError(f"chroma planes {self.u.shape}, {self.v.shape} do not fit luma {self.y.shape}")

    def __repr__(self) -> str:
        return f"Planes(y={self.y.shape}, u={self.u.shape}, v={self.v.shape})"

    @staticmethod
    def nbytes(num_frames: int, box: Box) -> int:
        """Bytes of a clip's planes, packed."""
        return num_frames * box.height * box.width * 3 // 2

    @classmethod
    def packed(cls, buffer: UInt8Array, num_frames: int, box: Box) -> Planes:
        """Views of a flat uint8 buffer: all luma planes, then all U, then all V."""
        luma, chroma = num_frames * box.height * box.width, num_frames * (box.height // 2) * (box.width // 2)
        half = (num_frames, box.height // 2, box.width // 2)
        return cls(
            buffer[:luma].reshape(num_frames, box.height, box.width),
            buffer[luma : luma + chroma].reshape(half),
            buffer[luma + chroma : luma + 2 * chroma].reshape(half),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Rgb:
    """Where a decoder puts finished frames: cropped, resized, flipped, converted.

    Attributes:
        data: uint8 [3, T, H, W].
    """

    data: UInt8Array

    def __post_init__(self) -> None:
        if self.data.ndim != 4 or self.data.shape[0] != 3 or self.data.dtype != np.uint8:
            raise UsageError(f"RGB output must be uint8 [3, T, H, W], got {self.data.dtype} {self.data.shape}")

    def __repr__(self) -> str:
        return f"Rgb({self.data.shape})"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRgb:
    """Where a decoder puts finished frames that never leave its device: cropped, resized, flipped, converted.

    Attributes:
        data: torch uint8 [3, T, H, W] on the decoder's device. What is written is there for every stream of the device
            when `decode` returns.
    """

    data: Any

    def __repr__(self) -> str:
        return f"DeviceRgb({tuple(self.data.shape)} on {self.data.device})"


Output = Planes | Rgb | DeviceRgb


@runtime_checkable
class Decoder(Protocol):
    """One lane of a back-end, owned by one thread at a time: a codec context cache, or a pipeline.

    Frames come out in the order of `request.frames`, repeats included. One bad clip never spoils another.
    """

    max_clips: int
    """The most clips of one call. Batch decoders want many, packet decoders one."""

    outputs: frozenset[type]
    """Which of `Planes`, `Rgb` and `DeviceRgb` it can write."""

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[Output]) -> list[FastvidError | None]:
        """Decodes each clip into the output of the same index.

        Returns:
            For each clip None, or the DecodeError that says why its output is not valid.
        """
        ...

    def close(self) -> None:
        """Frees everything. The decoder cannot be used afterwards."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames of one sample for people: a notebook, a page, a check.

    Attributes:
        data: uint8 [T, H, W, 3], RGB.
        frames: Frame indices, int64 [T].
        seconds: Presentation time of each frame, float64 [T], exact to float64 rounding.
    """

    data: UInt8Array
    frames: IntArray
    seconds: FloatArray = field(repr=False)

    def __repr__(self) -> str:
        t, h, w, _ = self.data.shape
        return f"FrameBatch({t} frames of {w}x{h}, indices {self.frames.tolist()})"
