"""Decoders on the CPU that pose as GPU decoders, so that the whole script runs on a machine without a GPU.

They have a GPU decoder's interface, arguments and outputs, and the frames of PyAV. What they prove is the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import torch

from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import DecoderOutput, DevicePlanes, DeviceRgb, EncodedClip, Planes, Rgb
from fastvid.errors import FastvidError
from fastvid.format.schema import Codec


class _Fake:
    """PyAV behind the interface of a GPU decoder."""

    max_clips = 4
    codecs: ClassVar[frozenset[Codec]] = frozenset({Codec.H264, Codec.HEVC})
    outputs: ClassVar[frozenset[type]]

    def __init__(self, *, device_id: int = 0, num_threads: int = 1) -> None:
        self.device_id, self.num_threads = device_id, num_threads
        self._decoder = PyAvDecoder()

    @staticmethod
    def lanes(device_id: int | None = None) -> int:  # noqa: ARG004
        """Return the number of engines, two."""
        return 2

    def close(self) -> None:
        """Release the decoder."""
        self._decoder.close()

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`."""
        return [self._one(clip, output) for clip, output in zip(clips, outputs, strict=True)]

    def _one(self, clip: EncodedClip, output: DecoderOutput) -> FastvidError | None:
        assert isinstance(output, DeviceRgb | DevicePlanes)
        if isinstance(output, DeviceRgb):
            rgb = np.empty(tuple(output.data.shape), np.uint8)
            (error,) = self._decoder.decode([clip], [Rgb(rgb)])
            output.data.copy_(torch.from_numpy(rgb))
            return error
        frames, box = len(clip.request.frames), clip.request.box
        planes = Planes.packed(np.empty(Planes.nbytes(frames, box), np.uint8), frames, box)
        (error,) = self._decoder.decode([clip], [planes])
        output.y.copy_(torch.from_numpy(planes.y))
        for channel, plane in enumerate((planes.u, planes.v)):
            output.uv[..., channel].copy_(torch.from_numpy(plane))
        return error


class FakeRgb(_Fake):
    """Poses as a decoder that leaves RGB on the device."""

    outputs = frozenset({DeviceRgb})


class FakePlanes(_Fake):
    """Poses as a decoder that leaves NV12 on the device, or RGB where that is wanted."""

    outputs = frozenset({DevicePlanes, DeviceRgb})


BACKENDS: Final = tuple(
    Backend(name=name, target=f"bench.gpu.fake:{kind}", device="cpu", codecs=_Fake.codecs, install="")
    for name, kind in (("fake-planes", "FakePlanes"), ("fake-rgb", "FakeRgb"))
)
"""The decoders of ``--fake``."""
