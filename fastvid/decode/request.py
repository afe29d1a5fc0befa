"""The decoder interface: its inputs and outputs, value objects that check their own shapes, and the base of decoders.

The container of a video may say to turn, mirror, crop or stretch the decoded pictures to show them. `ThreadDecoder` is
the one place where this is done, for every decoder: the decoder gets the part of the decoded pictures that the crop
shows, and an output of that shape. Turning and mirroring are then views of the output, which cost nothing.

Shape letters: T frames of a clip, H and W output size, h and w crop size, P packets fed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.format.presentation import Coded
from fastvid.format.schema import INPUT_PADDING
from fastvid.runtime.arrays import BoolArray, IntArray, UInt8Array

SLACK: Final = 64
"""Bytes of padding required after planes that are converted: SIMD code may read past the last row."""


@dataclass(frozen=True, slots=True)
class Box:
    """A crop in pixels of the pictures as they are shown, upright and in their proportions.

    All four numbers are even, so that luma and chroma are cut at the same place.
    """

    y: int
    x: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if self.y < 0 or self.x < 0 or self.height <= 0 or self.width <= 0:
            raise UsageError(f"crop {self} has a negative corner or no area")
        if (self.y | self.x | self.height | self.width) & 1:
            raise UsageError(
                f"crop {self} has an odd side or corner", hint="use even numbers: 4:2:0 chroma has half the resolution"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ClipRequest:
    """A fully determined clip: frames, crop, size and flip. Decoders are pure functions of it.

    Attributes:
        sample: Row of the sample in its dataset.
        frames: Display-order frame indices, int64 [T]; in any order, repeats allowed.
        box: Crop inside the stream.
        size: Output height and width in pixels; equal to the box's if nothing is resized.
        flip: Whether to mirror left and right after the crop.
        stream: Name of the sample's video stream.
        levels: Whether to deliver luma of more than 8 bits unconverted, as `Levels`, instead of a picture.
    """

    sample: int
    frames: IntArray
    box: Box
    size: tuple[int, int]
    flip: bool = False
    stream: str = "rgb"
    levels: bool = False

    def __post_init__(self) -> None:
        if self.frames.ndim != 1 or not len(self.frames) or self.frames.dtype != np.int64:
            raise UsageError(f"frames must be int64 [T] with T > 0, got {self.frames.dtype} {self.frames.shape}")
        if min(self.size) <= 0:
            raise UsageError(f"output size {self.size} must be positive")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedClip:
    """A request with the packets that decode it; their checksums have been verified.

    Attributes:
        request: The frames and the crop.
        info: Facts about the stream.
        data: The planned packets' bytes, and those between them, followed by at least 64 more. Must not change until
            the decoder's `decode` returns.
        starts: First byte of each packet in `data`, int64 [P], in decode order.
        sizes: Size of each packet in bytes, int64 [P].
        shows: Index of the frame that each packet shows, -1 for none, int64 [P].
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
            raise UsageError(f"crop {box} exceeds the {info.width}x{info.height} stream", key=self.key)
        if not len(self.starts) == len(self.sizes) == len(self.shows) == len(self.keys) > 0:
            raise UsageError("starts, sizes, shows and keys must have one entry per packet", key=self.key)
        if int(np.maximum.reduce(self.starts + self.sizes)) + INPUT_PADDING > len(self.data):
            raise UsageError(f"packet data must end with {INPUT_PADDING} bytes of padding", key=self.key)

    def __reduce__(self) -> tuple[object, ...]:
        # Memoryviews do not pickle, and clips are sent to worker processes.
        parts = (self.starts, self.sizes, self.shows, self.keys, self.key, self.shard)
        return _from_bytes, (self.request, self.info, bytes(self.data), *parts)

    def error(self, message: str, *, hint: str | None = None, **where: object) -> DecodeError:
        """Return a DecodeError that names this clip."""
        return DecodeError(message, hint=hint, shard=self.shard or None, key=self.key or None, **where)


def _from_bytes(request: ClipRequest, info: StreamInfo, data: bytes, *parts: Any) -> EncodedClip:
    return EncodedClip(request, info, memoryview(data), *parts)


class _Output:
    """Base of the memory that a decoder writes; its repr shows shapes, not pixels."""

    __slots__ = ()

    def __repr__(self) -> str:
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        shapes = (f"{name}={tuple(one.shape)}" for name, one in arrays.items() if hasattr(one, "shape"))
        return f"{type(self).__name__}({', '.join(shapes)})"


def split_planes(buffer: Any, count: int, height: int, width: int) -> tuple[Any, Any, Any]:
    """Return views of a flat uint8 array or tensor: luma [T, h, w], then all U, then all V, each [T, h/2, w/2]."""
    luma, chroma, half = count * height * width, count * (height // 2) * (width // 2), (count, height // 2, width // 2)
    u, v = buffer[luma : luma + chroma], buffer[luma + chroma : luma + 2 * chroma]
    return buffer[:luma].reshape(count, height, width), u.reshape(half), v.reshape(half)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Planes(_Output):
    """Output for cropped YUV 4:2:0 frames: 1.5 bytes per pixel, neither resized nor flipped.

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
            raise UsageError(f"chroma planes {self.u.shape}, {self.v.shape} do not match luma {self.y.shape}")

    @staticmethod
    def nbytes(num_frames: int, box: Box) -> int:
        """Return the size of a clip's packed planes in bytes."""
        return num_frames * box.height * box.width * 3 // 2

    @classmethod
    def packed(cls, buffer: UInt8Array, num_frames: int, box: Box) -> Planes:
        """Return views of a flat uint8 buffer: all luma planes, then all U, then all V."""
        return cls(*split_planes(buffer, num_frames, box.height, box.width))

    @property
    def arrays(self) -> tuple[UInt8Array, ...]:
        """All planes."""
        return self.y, self.u, self.v

    def write(self, box: Box, frame: Any, place: int, top: int = 0) -> None:
        """Copy the crop of a frame of PyAV to index `place`; `top`: first row of the picture in the frame."""
        for plane, target, scale in zip(frame.planes, self.arrays, (1, 2, 2), strict=True):
            start = (top + box.y) // scale * plane.line_size + box.x // scale
            target[place] = np.ndarray(target.shape[1:], np.uint8, plane, start, (plane.line_size, 1))

    def cut(self, box: Box, index: Sequence[int], into: Planes) -> None:
        """Copy a crop of some frames to other planes; `index`: for each frame there its index here, [T]."""
        for source, target, scale in zip(self.arrays, into.arrays, (1, 2, 2), strict=True):
            (height, width), y, x = target.shape[1:], box.y // scale, box.x // scale
            rows, columns = slice(y, y + height), slice(x, x + width)
            for place, frame in enumerate(index):
                target[place] = source[frame, rows, columns]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Levels(_Output):
    """Output for cropped luma of more than 8 bits, neither resized nor flipped.

    Attributes:
        data: uint16 [T, h, w].
    """

    data: npt.NDArray[np.uint16]

    @property
    def arrays(self) -> tuple[npt.NDArray[np.uint16], ...]:
        """The only plane."""
        return (self.data,)

    def write(self, box: Box, frame: Any, place: int, top: int = 0) -> None:
        """Copy the crop of a frame of PyAV to index `place`; `top`: first row of the picture in the frame."""
        luma = frame.format.components[0]
        if luma.bits <= 8 or frame.format.is_rgb or frame.format.is_big_endian:
            raise DecodeError(f"pictures of format {frame.format.name} have no luma of more than 8 bits")
        plane = frame.planes[0]
        start = (top + box.y) * plane.line_size + 2 * box.x
        self.data[place] = np.ndarray(self.data.shape[1:], np.uint16, plane, start, (plane.line_size, 2))


def packed_size(request: ClipRequest) -> int:
    """Return the bytes of a clip's `Planes`, or of its `Levels` if the request is for levels."""
    count = len(request.frames)
    return 2 * count * request.box.height * request.box.width if request.levels else Planes.nbytes(count, request.box)


def packed(buffer: UInt8Array, request: ClipRequest) -> Planes | Levels:
    """Return views of a flat uint8 buffer of `packed_size` bytes: `Levels` if the request is for them, or `Planes`."""
    if not request.levels:
        return Planes.packed(buffer, len(request.frames), request.box)
    return Levels(buffer.view(np.uint16).reshape(len(request.frames), request.box.height, request.box.width))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rgb(_Output):
    """Output for finished frames on the host: cropped, resized, flipped and converted.

    Attributes:
        data: uint8 [3, T, H, W].
        fast: Whether frames are resized before they are converted: in two thirds of the time, 0.9 of 255 levels off
            on average.
    """

    data: UInt8Array
    fast: bool = False

    def __post_init__(self) -> None:
        if self.data.ndim != 4 or self.data.shape[0] != 3 or self.data.dtype != np.uint8:
            raise UsageError(f"RGB output must be uint8 [3, T, H, W], got {self.data.dtype} {self.data.shape}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeviceRgb(_Output):
    """Output for finished frames on the decoder's device: cropped, resized, flipped and converted.

    Attributes:
        data: torch uint8 [3, T, H, W] on the decoder's device; visible to every CUDA stream when `decode` returns.
        writable: CUDA event that the decoder's stream waits for before it writes, because the memory may still be in
            use; None if it may write at once.
    """

    data: Any
    writable: Any = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DevicePlanes(_Output):
    """Output for cropped NV12 frames on the decoder's device, neither resized nor flipped.

    Attributes:
        y: torch uint8 [T, h, w] on the decoder's device; visible to every CUDA stream when `decode` returns.
        uv: torch uint8 [T, h/2, w/2, 2], U and V of each chroma sample.
        writable: CUDA event that the decoder's stream waits for before it writes, because the memory may still be in
            use; None if it may write at once.
    """

    y: Any
    uv: Any
    writable: Any = None

    def __post_init__(self) -> None:
        t, h, w = self.y.shape
        if tuple(self.uv.shape) != (t, h // 2, w // 2, 2):
            raise UsageError(f"chroma {tuple(self.uv.shape)} does not match luma {tuple(self.y.shape)}")


DecoderOutput = Planes | Levels | Rgb | DeviceRgb | DevicePlanes


@runtime_checkable
class Decoder(Protocol):
    """A decoder, used by one thread at a time.

    Frames are written in the order of `request.frames`, including repeats. A bad clip never affects another one.
    """

    max_clips: int
    """Maximum number of clips per call of `decode`."""

    outputs: frozenset[type]
    """The types among `Planes`, `Levels`, `Rgb`, `DeviceRgb` and `DevicePlanes` that it can write."""

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """Decode each clip into the output with the same index.

        Returns:
            For each clip None, or the DecodeError that explains why its output is invalid.
        """
        ...

    def close(self) -> None:
        """Release all resources. The decoder cannot be used afterwards."""
        ...


def check_output(clip: EncodedClip, output: DecoderOutput, kinds: Set[type]) -> None:
    """Raise UsageError if a decoder that writes `kinds` cannot write a clip to an output, or if its shape is wrong."""
    request, box = clip.request, clip.request.box
    if type(output) not in kinds:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise UsageError(f"the decoder writes {names}, not {type(output).__name__}")
    size = request.size if isinstance(output, Rgb | DeviceRgb) else (box.height, box.width)
    shape = (output.y if isinstance(output, Planes | DevicePlanes) else output.data).shape[-3:]
    expected = (len(request.frames), *size)
    if tuple(shape) != expected:
        raise UsageError(f"output has shape {tuple(shape)}, the request requires {expected}")


def first_places(frames: Sequence[int]) -> dict[int, int]:
    """Return for each frame the first index in `frames`, which is also its first index in the output."""
    return dict(zip(reversed(frames), range(len(frames) - 1, -1, -1), strict=True))


def repeat_frames(frames: Sequence[int], places: Mapping[int, int], planes: Iterable[Any]) -> None:
    """Copy each frame that is shown several times from its first index in the output to the others."""
    for plane in planes:
        for place, frame in enumerate(frames):
            if places[frame] != place:
                plane[place] = plane[places[frame]]


def check_order(clip: EncodedClip, decoded: Sequence[int], wanted: Collection[int]) -> None:
    """Raise DecodeError unless a decoder returned exactly the frames that a clip's packets show, in order.

    `decoded`: frame numbers in the order of the decoder. `wanted`: frames that the output needs.
    """
    for last, number in pairwise(decoded):
        if number <= last:
            raise DecodeError(
                f"frame {number} was decoded after frame {last}",
                hint="run `fastvid index`: the packet index is wrong",
            )
    shown = int(np.count_nonzero(clip.shows >= 0))
    if len(decoded) != shown:
        raise DecodeError(f"{len(decoded)} frames were decoded from {shown} packets that show a frame")
    missing = len(set(wanted).difference(decoded))
    if missing:
        raise DecodeError(f"plan lacks the packets of {missing} wanted frames")


class ThreadDecoder(ABC):
    """Base of decoders: rejects a second thread while the decoder is in use, and all calls after it was closed."""

    NAME: ClassVar[str]  # for messages
    outputs: frozenset[type]

    def __init__(self) -> None:
        self._lock, self._is_closed = threading.Lock(), False

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """See `Decoder`."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(f"{self.NAME} is in use by another thread", hint="open one decoder for each thread")
        try:
            if self._is_closed:
                raise UsageError("decoder is closed")
            coded = False
            for clip, output in zip(clips, outputs, strict=True):
                check_output(clip, output, self.outputs)
                coded |= clip.info.coded is not None
            return self._decode_shown(clips, outputs) if coded else self._decode_all(clips, outputs)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Release all resources. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._release()

    @abstractmethod
    def _decode_all(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """Decode clips, as if decoded pictures were shown unchanged; only one thread is here at a time."""

    @abstractmethod
    def _release(self) -> None:
        """Release contexts and buffers."""

    def _decode_shown(
        self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]
    ) -> list[FastvidError | None]:
        prepared = [_prepare(clip, output) for clip, output in zip(clips, outputs, strict=True)]
        errors = self._decode_all([clip for clip, _, _ in prepared], [output for _, output, _ in prepared])
        for (_, _, finish), error in zip(prepared, errors, strict=True):
            if error is None:
                finish()
        return errors


def _prepare(clip: EncodedClip, output: DecoderOutput) -> tuple[EncodedClip, DecoderOutput, Callable[[], None]]:
    """Return the clip in the coordinates of decoded pictures, an output for it, and what to call after decoding.

    The last one fills the wanted output, if the decoder does not write to views of it.
    """
    coded, request = clip.info.coded, clip.request
    if coded is None:
        return clip, output, _nothing
    box = request.box
    cut = Box(*coded.cut((clip.info.height, clip.info.width), (box.y, box.x, box.height, box.width)))
    size = request.size[::-1] if coded.turn % 2 else request.size
    flip = request.flip and isinstance(output, Planes | Levels | DevicePlanes)  # whoever uses planes flips them
    inner = replace(clip, info=clip.info.decoded, request=replace(request, box=cut, size=size, flip=flip))
    if isinstance(output, Rgb):
        return inner, _coded_rgb(output, request, coded), _nothing
    if isinstance(output, DeviceRgb | DevicePlanes):
        return inner, *_on_device(output, coded, cut, request.flip, size)
    views = [_coded_view(plane, coded) for plane in output.arrays]
    if views[0].shape[1:] == (cut.height, cut.width):
        return inner, type(output)(*views), _nothing
    assert isinstance(output, Planes)
    count = len(request.frames)
    buffer = np.empty(Planes.nbytes(count, cut) + SLACK, np.uint8)
    whole = Planes.packed(buffer, count, cut)
    return inner, whole, lambda: _stretch(whole, views)


def as_decoded(
    coded: Coded | None, request: ClipRequest, planes: Planes, index: Sequence[int], output: Rgb
) -> tuple[ClipRequest, Planes, Sequence[int], Rgb]:
    """Return a clip out of shown planes in the coordinates of decoded pictures, as `ThreadDecoder` has clips converted.

    libswscale resizes rows and columns with different rounding. `index`: for each frame of the clip its index in
    `planes`; also returned for the new planes.
    """
    if coded is None:
        return request, planes, index, output
    sides, size = (request.box.height, request.box.width), request.size
    if coded.turn % 2:
        sides, size = sides[::-1], size[::-1]
    box, count = Box(0, 0, *sides), len(index)
    whole = Planes.packed(np.empty(Planes.nbytes(count, box) + SLACK, np.uint8), count, box)
    planes.cut(request.box, index, Planes(*[_shown_view(plane, coded) for plane in whole.arrays]))
    inner = replace(request, box=box, size=size, flip=False)
    return inner, whole, range(count), _coded_rgb(output, request, coded)


def _nothing() -> None:
    pass


def _coded_rgb(output: Rgb, request: ClipRequest, coded: Coded) -> Rgb:
    data = output.data[..., ::-1] if request.flip else output.data
    return replace(output, data=_coded_view(data, coded))


def _coded_view(data: npt.NDArray[Any], coded: Coded) -> npt.NDArray[Any]:
    """Return a view of shown pictures, [..., H, W], into which decoded pictures can be written."""
    turned = np.rot90(data, coded.turn, axes=(-2, -1))  # counterclockwise
    return turned[..., ::-1] if coded.mirror else turned


def _shown_view(data: npt.NDArray[Any], coded: Coded) -> npt.NDArray[Any]:
    """Return a view of decoded pictures, [..., H, W], into which shown pictures can be written."""
    return np.rot90(data[..., ::-1] if coded.mirror else data, -coded.turn, axes=(-2, -1))


def _stretch(planes: Planes, targets: Sequence[npt.NDArray[Any]]) -> None:
    """Write frames at another size, because the pixels of the video are not square."""
    from av.video.frame import VideoFrame
    from av.video.reformatter import Interpolation

    height, width = targets[0].shape[1:]
    for number, arrays in enumerate(zip(*planes.arrays, strict=True)):
        frame = VideoFrame.from_dlpack(arrays, format="yuv420p")
        frame = frame.reformat(width, height, interpolation=Interpolation.BILINEAR, threads=1)
        plane: Any  # supports the buffer protocol, which the stubs omit
        for plane, target in zip(frame.planes, targets, strict=True):
            target[number] = np.ndarray(target.shape[1:], np.uint8, plane, 0, (plane.line_size, 1))


def _on_device(
    output: DeviceRgb | DevicePlanes, coded: Coded, cut: Box, flip: bool, size: tuple[int, int]
) -> tuple[DecoderOutput, Callable[[], None]]:
    """Return an output for decoded pictures on the same device, and a function that copies it upright to `output`."""
    import torch

    if isinstance(output, DeviceRgb):
        inner: DeviceRgb | DevicePlanes = DeviceRgb(output.data.new_empty((*output.data.shape[:2], *size)))
    else:
        shape = (len(output.y), cut.height, cut.width)
        half = (len(output.y), cut.height // 2, cut.width // 2, 2)
        inner = DevicePlanes(output.y.new_empty(shape), output.uv.new_empty(half))

    def finish() -> None:
        if output.writable is not None:
            torch.cuda.current_stream().wait_event(output.writable)
        for data, target, row in _pairs(inner, output):
            shown = data.flip(row + 1) if coded.mirror else data
            shown = torch.rot90(shown, -coded.turn, (row, row + 1))
            if flip and isinstance(output, DeviceRgb):
                shown = shown.flip(row + 1)
            target.copy_(shown if shown.shape == target.shape else _resized(shown, target.shape))
            if target.is_cuda:
                torch.cuda.current_stream(target.device).synchronize()

    return inner, finish


def _pairs(inner: DeviceRgb | DevicePlanes, output: DeviceRgb | DevicePlanes) -> list[tuple[Any, Any, int]]:
    """Return pairs of tensors, decoded and shown pictures, each with the number of the dimension that counts rows."""
    if isinstance(inner, DeviceRgb) and isinstance(output, DeviceRgb):
        return [(inner.data, output.data, 2)]
    assert isinstance(inner, DevicePlanes)
    assert isinstance(output, DevicePlanes)
    return [(inner.y, output.y, 1), (inner.uv, output.uv, 1)]


def _resized(data: Any, shape: tuple[int, ...]) -> Any:
    """Return planes, [T, h, w] or [T, h, w, 2], resized to the height and width of `shape`."""
    import torch

    planes = data[:, None] if data.ndim == 3 else data.permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(planes.float(), shape[1:3], mode="bilinear", antialias=True)
    resized = resized.add_(0.5).clamp_(0, 255).byte()
    return resized[:, 0] if data.ndim == 3 else resized.permute(0, 2, 3, 1)
