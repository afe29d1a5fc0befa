"""Decoders of the CPU that pose as decoders of a device, right ones and eight that are spoiled.

Each failure is one that a decoder of a GPU can have without raising an error.
"""

from __future__ import annotations

import numpy as np
import torch

from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import DeviceRgb, Planes, Rgb
from fastvid.format.schema import Codec


class Posing:
    """Decodes with PyAV; `spoil` changes the pictures, given as [T, C, h, w]: RGB, or Y and UV, with those before."""

    max_clips = 1

    def __init__(self):
        self._decoder, self._before = PyAvDecoder(), []

    def decode(self, clips, outputs):
        return [self._decode(clip, output) for clip, output in zip(clips, outputs, strict=True)]

    def close(self):
        self._decoder.close()

    def _decode(self, clip, output):
        host, targets = _host(clip, output)
        (error,) = self._decoder.decode([clip], [host])
        if error is None:
            if isinstance(host, Rgb):
                pictures = [host.data.transpose(1, 0, 2, 3)]
            else:
                pictures = [host.y[:, None], np.stack((host.u, host.v), 1)]
            for spoilt, target in zip(self.spoil(pictures, self._before), targets, strict=True):
                target[: len(spoilt)].copy_(torch.from_numpy(np.ascontiguousarray(spoilt)))
            self._before = [one.copy() for one in pictures]
        return error


def _host(clip, output):
    """Return an output on the host, and views [T, C, h, w] of the given one."""
    if isinstance(output, Rgb | DeviceRgb):
        return Rgb(np.empty(tuple(output.data.shape), np.uint8)), [torch.as_tensor(output.data).transpose(0, 1)]
    t, h, w = output.y.shape
    half = (t, h // 2, w // 2)
    host = Planes(np.empty((t, h, w), np.uint8), np.empty(half, np.uint8), np.empty(half, np.uint8))
    return host, [output.y[:, None], output.uv.permute(0, 3, 1, 2)]


def _black(pictures, _):
    return [
        np.full_like(one, level) for one, level in zip(pictures, (16, 128) if len(pictures) > 1 else (0,), strict=True)
    ]


def _stale(pictures, before):
    return before if [one.shape for one in before] == [one.shape for one in pictures] else pictures


def _of_full_range(pictures, _):
    return [np.rint(pictures[0] * (219 / 255) + 16).astype(np.uint8), *pictures[1:]]


SPOILED = {
    "black": _black,
    "last two frames as they were": lambda pictures, _: [one[:-2] for one in pictures],
    "pictures of the call before": _stale,
    "red and blue, or U and V, exchanged": lambda pictures, _: [one[:, ::-1] for one in pictures],
    "upside down": lambda pictures, _: [one[:, :, ::-1] for one in pictures],
    # From the second frame of a clip on, the frame before the requested one.
    "late": lambda pictures, _: [np.concatenate((one[:1], one[:-1])) for one in pictures],
    "eight pixels to the right": lambda pictures, _: [
        np.roll(one, shift, 3) for one, shift in zip(pictures, (8, 4), strict=False)
    ],
    "limited range as full range": _of_full_range,
}


def posing(kind: type, spoiled: str = "", bound: float = 1.5) -> Backend:
    """Return a back-end that writes one type of output on a device, which is the CPU."""
    name = f"{kind.__name__}, {spoiled or 'right'}"
    spoil = SPOILED.get(spoiled, lambda pictures, _: pictures)
    globals()[name] = type(name, (Posing,), {"outputs": frozenset({kind}), "spoil": staticmethod(spoil)})
    return Backend(name, f"{__name__}:{name}", "cpu", frozenset(Codec), "nothing", bound)
