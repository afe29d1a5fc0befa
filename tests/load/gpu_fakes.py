"""Decoders that leave frames on the fake GPU, right ones and spoiled ones."""

import threading
from typing import ClassVar

import torch

from fastvid.decode.backends import Backend
from fastvid.decode.request import DevicePlanes, DeviceRgb
from fastvid.format.schema import Codec
from tests.load.fakes import RgbDecoder


class GpuDecoder(RgbDecoder):
    """Decodes as `Decoder` asks: on a stream of its own, after `writable`, and its frames are there when it returns."""

    outputs = frozenset({DeviceRgb})
    waits = syncs = True
    opened: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, *, device_id):
        super().__init__()
        assert torch.cuda.current_device() == device_id
        self.opened.append((device_id, threading.current_thread().name))
        self.stream = torch.cuda.Stream(device_id, priority=-1)

    @staticmethod
    def check(device_id):
        pass

    @staticmethod
    def lanes(device_id):
        return 2

    def decode(self, clips, outputs):
        with torch.cuda.stream(self.stream):
            for output in outputs if self.waits else ():
                self.stream.wait_event(output.writable)
            errors = super().decode(clips, outputs)
        if self.syncs:
            self.stream.record_event().synchronize()
        return errors

    def write(self, output, t, levels):
        for channel, level in enumerate(levels):
            output.data[channel, t] = level


class GpuPlanesDecoder(GpuDecoder):
    """Leaves on the GPU what `PlanesDecoder` writes on the host."""

    outputs = frozenset({DevicePlanes})

    def write(self, output, t, levels):
        output.y[t], output.uv[t] = 16 + 10 * levels[1], 128


class Careless(GpuDecoder):
    """Writes at once, where an earlier batch may still be read."""

    waits = False


class Hasty(GpuDecoder):
    """Returns before its frames are written."""

    syncs = False


class Damaged(GpuDecoder):
    """Reports every third sample as damaged."""

    def decode(self, clips, outputs):
        super().decode(clips, outputs)
        return [clip.error("multiple of three") if clip.request.sample % 3 == 0 else None for clip in clips]


def gpu(name="GpuDecoder"):
    """Return a back-end with a decoder of this file."""
    return Backend(name, f"{__name__}:{name}", "cuda", frozenset(Codec), "nothing")
