"""A PyNvVideoCodec that decodes with PyAV onto the fake CUDA.

It has what `fastvid.decode.nvdec` uses, with the names of 2.2.4, and is as unforgiving: memory of pictures is reused by
the next packet, the stream must have parameter sets and start codes, a decoder has a largest size, and a change of size
must be announced. `Faults` makes it fail as a parser of a GPU does.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace

import av
import numpy as np
import pytest
import torch

from fastvid.decode import engines
from fastvid.decode.pyav import open_context
from fastvid.format.schema import Codec
from tests import fake_cuda

_CODECS = {codec.label.upper(): codec for codec in (Codec.H264, Codec.HEVC, Codec.VP9, Codec.AV1)}
cudaVideoCodec = Enum("cudaVideoCodec", list(_CODECS))  # noqa: N816 - the name of PyNvVideoCodec
OutputColorType = Enum("OutputColorType", ["NATIVE"])
DisplayDecodeLatencyType = Enum("DisplayDecodeLatencyType", ["NATIVE", "LOW", "ZERO"])
VideoPacketFlag = Enum("VideoPacketFlag", {"ENDOFSTREAM": 1, "ENDOFPICTURE": 8})


@dataclass
class Faults:
    """What goes wrong, and what was seen.

    Attributes:
        drop: pts of a picture that the parser swallows.
        again: pts of a picture that is returned twice.
        reconfigured: Whether a decoder fails after a change of its size.
        created: Options of every decoder.
        sizes: Sizes announced to decoders, in order.
    """

    drop: int | None = None
    again: int | None = None
    reconfigured: bool = False
    created: list = field(default_factory=list)
    sizes: list = field(default_factory=list)


class PacketData:
    def __init__(self):
        self.bsl_data = self.bsl = self.pts = 0
        self.decode_flag = None


class Frame:
    def __init__(self, pts, planes):
        self.pts, self.planes = pts, planes

    def getPTS(self):  # noqa: N802 - the name of PyNvVideoCodec
        return self.pts

    def cuda(self):
        return self.planes


class PyNvDecoder:
    def __init__(self, faults, cuda, **options):
        faults.created.append(options)
        assert options["usedevicememory"]
        assert options["outputColorType"] is OutputColorType.NATIVE
        self.faults, self.cuda, self.options, self.size = faults, cuda, options, None
        (self.stream,) = [one for one in cuda.streams if one.cuda_stream == options["cudastream"]]
        assert self.stream.index == options["gpuid"]
        self.context = open_context(_CODECS[options["codec"].name], b"")
        self.lent, self.announced = [], False

    def setReconfigParams(self, width, height):  # noqa: N802 - the name of PyNvVideoCodec
        self.faults.sizes.append((width, height))
        self.announced = True

    def Decode(self, packet):  # noqa: N802 - the name of PyNvVideoCodec
        with self.cuda.stream(self.stream):
            for plane in self.lent:
                plane.fill_(0x77)
            self.lent = []
            if packet.decode_flag is VideoPacketFlag.ENDOFSTREAM:
                assert packet.bsl == 0
                found = list(self.context.decode(None))
                self.context.flush_buffers()
            else:
                assert packet.decode_flag is VideoPacketFlag.ENDOFPICTURE
                picture = av.Packet(ctypes.string_at(packet.bsl_data, packet.bsl))
                picture.pts = packet.pts
                found = self.context.decode(picture)
            return [made for frame in found for made in self._frames(frame)]

    def _frames(self, frame):
        if frame.is_corrupt:
            raise RuntimeError("cuvidDecodePicture failed")
        size = (frame.width, frame.height)
        if self.size not in (None, size):
            assert self.announced, "the size changed without setReconfigParams"
            if self.faults.reconfigured:
                raise RuntimeError("Reconfigure not supported\nmore lines")
        self.size = size
        if size[0] > self.options["maxwidth"] or size[1] > self.options["maxheight"]:
            raise RuntimeError("Reconfigure not supported when the size exceeds maxwidth or maxheight")
        if frame.pts == self.faults.drop:
            return []
        y, u, v = (_plane(plane, rows, columns) for plane, rows, columns in _sizes(frame))
        planes = [self._lend(y[..., None]), self._lend(np.stack((u, v), -1))]
        return [Frame(frame.pts, planes)] * (1 + (frame.pts == self.faults.again))

    def _lend(self, values):
        lent = self.cuda.wrap(torch.from_numpy(values), self.options["gpuid"]).add_(0)
        self.lent.append(lent)
        return lent


def _sizes(frame):
    height, width = frame.height, frame.width
    return zip(frame.planes, (height, height // 2, height // 2), (width, width // 2, width // 2), strict=True)


def _plane(plane, rows, columns):
    return np.ndarray((rows, columns), np.uint8, plane, 0, (plane.line_size, 1)).copy()


@pytest.fixture
def nvc(monkeypatch):
    """Replace CUDA and PyNvVideoCodec; the `Faults`, with `cuda`. Nothing that the test did may race."""
    cuda = fake_cuda.install(monkeypatch)
    # The views are tensors of the fake already, and torch does not copy what is on the device.
    monkeypatch.setattr(torch, "as_tensor", lambda view, device: view)
    cuda.log, cuda.syncs = deque(maxlen=10_000), deque(maxlen=10_000)
    faults, module = Faults(), ModuleType("PyNvVideoCodec")
    for thing in (cudaVideoCodec, OutputColorType, DisplayDecodeLatencyType, VideoPacketFlag, PacketData):
        setattr(module, thing.__name__, thing)
    module.CreateDecoder = lambda **options: PyNvDecoder(faults, cuda, **options)
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", module)
    monkeypatch.delitem(sys.modules, "fastvid.decode.nvdec", raising=False)
    monkeypatch.setattr(engines, "capabilities", lambda device_id: dict.fromkeys(_CODECS.values(), 7))
    yield SimpleNamespace(faults=faults, cuda=cuda)
    sys.modules.pop("fastvid.decode.nvdec", None)
