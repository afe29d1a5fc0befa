"""The NVDEC back-end: feeds planned packets to a GPU's video decoder and leaves NV12 frames on the GPU.

It uses the packet decoder of PyNvVideoCodec (NVIDIA; checked against 2.2.4), without a container and without its
conversion to RGB: `fastvid.decode.pixels` converts the decoded planes with the stream's own coefficients and range.
This has not been run on a GPU, so its speed is not measured; ``python -m bench gpu`` measures it.

- A decoder stays open between clips, one for each codec, and is reconfigured when the size changes. After any error it
  is discarded; a clip that fails in a reconfigured decoder is tried once more in a new one.
- Every packet carries its frame's index as pts. A picture that is missing, repeated or out of order is an error.
- Parameter sets precede each key packet, and an end of stream follows each clip, so that no picture of one clip can
  show in another.
- Frames are copied on the decoder's own stream before the next packet, which reuses their memory.
- NVDEC conceals damage without an error; the checksums of packets detect it before they are decoded.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from itertools import starmap
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastvid.decode import engines
from fastvid.decode.containers import elementary_stream
from fastvid.decode.device_stream import DeviceStream
from fastvid.decode.request import (
    DecoderOutput,
    DevicePlanes,
    EncodedClip,
    ThreadDecoder,
    check_order,
    first_places,
    repeat_frames,
)
from fastvid.errors import DecodeError, FastvidError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec
from fastvid.runtime.values import check_choice

# Importing the package logs driver versions at level INFO.
logging.getLogger("PyNvVideoCodec").addFilter(lambda record: record.levelno > logging.INFO)
_nvc: Any = importlib.import_module("PyNvVideoCodec")

_CODECS: Final = {Codec.H264: "H264", Codec.HEVC: "HEVC", Codec.VP9: "VP9", Codec.AV1: "AV1"}
# The largest size of a new decoder is the stream's, rounded up to this, so that it can be reused for similar sizes.
_ROOM: Final = 256
_LATENCIES: Final = ("native", "low")
# Two threads take turns on an engine: while one copies and feeds, the other one's picture is decoded.
_LANES_PER_ENGINE: Final = 2


class NvdecDecoder(ThreadDecoder):
    """Decodes one clip at a time on a GPU's NVDEC engines, which several decoders share."""

    NAME = "NVDEC decoder"
    max_clips: Final = 1
    outputs = frozenset({DevicePlanes})

    def __init__(self, *, device_id: int | None = None, latency: str = "native") -> None:
        check_choice("latency", latency, _LATENCIES)
        super().__init__()
        self._latency = getattr(_nvc.DisplayDecodeLatencyType, latency.upper())
        self._stream = DeviceStream(engines.gpu_index(device_id))
        self._sessions: dict[Codec, _Session] = {}

    @staticmethod
    def check(device_id: int | None = None) -> None:
        """Raise MissingDependency, with the reason, if the GPU has no NVDEC engine."""
        engines.require(device_id)

    @staticmethod
    def lanes(device_id: int | None = None) -> int:
        """Return the number of decoders to open: two for each NVDEC engine. Which number is best is not measured."""
        return _LANES_PER_ENGINE * engines.engines(engines.gpu_index(device_id))

    def _decode_all(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        with self._stream.writing(outputs):
            return list(starmap(self._decode, zip(clips, outputs, strict=True)))

    def _release(self) -> None:
        self._sessions.clear()

    def _decode(self, clip: EncodedClip, target: DecoderOutput) -> FastvidError | None:
        codec, sessions = clip.info.codec, self._sessions
        assert isinstance(target, DevicePlanes)
        try:
            _check(clip)
            session = sessions.pop(codec, None)
            # Remove the decoder while it is in use; put it back only after a clip without errors.
            if session is not None and session.fits(clip.info):
                same_size = session.size == (clip.info.width, clip.info.height)
                try:
                    session.decode(clip, target)
                except DecodeError:
                    if same_size:
                        raise
                    session = None
            else:
                session = None
            if session is None:
                session = _Session(clip.info, self._stream, self._latency)
                session.decode(clip, target)
        except FastvidError as error:
            return clip.error(error.message, hint=error.hint).at(**error.where)
        sessions[codec] = session
        return None


class _Session:
    """An open decoder of one codec, for pictures up to a fixed size."""

    def __init__(self, info: StreamInfo, stream: DeviceStream, latency: Any) -> None:
        self.size = (info.width, info.height)
        self._room = tuple(-(-side // _ROOM) * _ROOM for side in self.size)
        self._device = stream.device
        try:
            self._decoder = _nvc.CreateDecoder(
                gpuid=stream.device.index,
                codec=getattr(_nvc.cudaVideoCodec, _CODECS[info.codec]),
                cudacontext=0,
                cudastream=stream.stream.cuda_stream,
                usedevicememory=True,
                maxwidth=self._room[0],
                maxheight=self._room[1],
                outputColorType=_nvc.OutputColorType.NATIVE,
                latency=latency,
            )
        except Exception as error:  # PyNvVideoCodec raises exceptions of several types
            raise _failed(error) from error

    def fits(self, info: StreamInfo) -> bool:
        """Return whether the decoder can be reconfigured for a stream's size."""
        return info.width <= self._room[0] and info.height <= self._room[1]

    def decode(self, clip: EncodedClip, target: DevicePlanes) -> None:
        """Decode a clip's wanted frames into the target, on the current stream."""
        packets = elementary_stream(clip)
        pictures = _Pictures(clip, target, self._device)
        address = packets.data.ctypes.data
        hidden = -1
        try:
            size = (clip.info.width, clip.info.height)
            if size != self.size:
                self._decoder.setReconfigParams(*size)
                self.size = size
            for start, length, show in zip(packets.starts, packets.sizes, clip.shows.tolist(), strict=True):
                pts, hidden = (show, hidden) if show >= 0 else (hidden, hidden - 1)
                self._feed(pictures, address + start, length, pts, _nvc.VideoPacketFlag.ENDOFPICTURE)
            self._feed(pictures, 0, 0, 0, _nvc.VideoPacketFlag.ENDOFSTREAM)
        except FastvidError:
            raise
        except Exception as error:  # PyNvVideoCodec raises exceptions of several types
            raise _failed(error) from error
        pictures.finish()

    def _feed(self, pictures: _Pictures, address: int, size: int, pts: int, flag: Any) -> None:
        packet = _nvc.PacketData()
        packet.bsl_data, packet.bsl, packet.pts, packet.decode_flag = address, size, pts, flag
        for frame in self._decoder.Decode(packet):
            pictures.take(frame)


class _Pictures:
    """Checks each decoded picture of a clip and copies the wanted ones to the output."""

    def __init__(self, clip: EncodedClip, target: DevicePlanes, device: torch.device) -> None:
        self._clip = clip
        self._target = target
        self._device = device
        self._places = first_places(clip.request.frames.tolist())
        self._decoded: list[int] = []

    def take(self, frame: Any) -> None:
        number = int(frame.getPTS())
        if number < 0:
            return
        self._decoded.append(number)
        info = self._clip.info
        y, uv = _planes(frame, self._device)
        rows, columns = y.shape
        # PyNvVideoCodec rounds odd sides up to even ones.
        if (rows + rows % 2, columns + columns % 2) != (info.height + info.height % 2, info.width + info.width % 2):
            raise DecodeError(f"frame {number} has size {columns}x{rows}, the stream {info.width}x{info.height}")
        place = self._places.get(number)
        if place is None:
            return
        box = self._clip.request.box
        below, right = box.y + box.height, box.x + box.width
        self._target.y[place].copy_(y[box.y : below, box.x : right], non_blocking=True)
        chroma = uv[box.y // 2 : below // 2, box.x // 2 : right // 2]
        self._target.uv[place].copy_(chroma, non_blocking=True)

    def finish(self) -> None:
        """Copy repeated frames, after checking that no picture is missing."""
        check_order(self._clip, self._decoded, self._places)
        repeat_frames(self._clip.request.frames.tolist(), self._places, (self._target.y, self._target.uv))


def _planes(frame: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return views of a picture's planes: Y [h, w] and UV [h/2, w/2, 2], uint8."""
    planes = [torch.as_tensor(view, device=device) for view in frame.cuda()]
    if [(plane.dtype, plane.shape[2:]) for plane in planes] != [(torch.uint8, (1,)), (torch.uint8, (2,))]:
        found = ", ".join(f"{plane.dtype} {tuple(plane.shape)}" for plane in planes)
        raise DecodeError(f"pictures are not 8-bit 4:2:0: {found}", hint="use pyav")
    y, uv = planes
    return y[..., 0], uv


def _check(clip: EncodedClip) -> None:
    """Raise DecodeError if NVDEC cannot decode the clip, or if its packets do not show all wanted frames."""
    if clip.info.codec not in _CODECS:
        known = ", ".join(sorted(codec.label for codec in _CODECS))
        raise DecodeError(f"NVDEC back-end decodes {known}, not {clip.info.codec.label}", hint="use pyav")
    if not clip.keys[0]:
        raise DecodeError("first packet of the plan is not a key packet")
    if not clip.sizes.all():
        raise DecodeError("packet is empty", frame=int(clip.shows[np.argmin(clip.sizes)]))
    if not np.isin(clip.request.frames, clip.shows).all():
        raise DecodeError("plan lacks the packets of some wanted frames")


def _failed(error: Exception) -> DecodeError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DecodeError(f"NVDEC: {lines[0]}")
