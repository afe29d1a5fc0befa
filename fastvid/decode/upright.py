"""Decode clips of videos whose container says to turn, mirror, crop or stretch the decoded pictures to show them.

The one place where this is done, for every decoder: the decoder gets the part of the decoded pictures that the crop
shows, and an output of that shape. Turning and mirroring are then views of the output, which cost nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation

from fastvid.decode.request import (
    SLACK,
    Box,
    DecoderOutput,
    DevicePlanes,
    DeviceRgb,
    EncodedClip,
    Levels,
    Planes,
    Rgb,
    check_output,
)
from fastvid.errors import FastvidError, UsageError
from fastvid.format.presentation import Coded


class ThreadDecoder(ABC):
    """Base of decoders: rejects a second thread while the decoder is in use, and all calls after it was closed."""

    NAME: ClassVar[str]  # for messages
    outputs: frozenset[type]

    def __init__(self) -> None:
        self._lock, self._is_closed = threading.Lock(), False

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`."""
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
        data = output.data[..., ::-1] if request.flip else output.data
        return inner, replace(output, data=_coded_view(data, coded)), _nothing
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


def _nothing() -> None:
    pass


def _coded_view(data: npt.NDArray[Any], coded: Coded) -> npt.NDArray[Any]:
    """Return a view of shown pictures, [..., H, W], into which decoded pictures can be written."""
    turned = np.rot90(data, coded.turn, axes=(-2, -1))  # counterclockwise
    return turned[..., ::-1] if coded.mirror else turned


def _stretch(planes: Planes, targets: Sequence[npt.NDArray[Any]]) -> None:
    """Write frames at another size, because the pixels of the video are not square."""
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
