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
    """Decodes with PyAV; `spoil` changes the pictures, given as [T, C, h, w]: RGB, or Y and UV."""

    max_clips = 1

    def __init__(self):
        self._decoder = PyAvDecoder()

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
            for spoilt, target in zip(self.spoil(pictures), targets, strict=True):
                target[: len(spoilt)].copy_(torch.from_numpy(np.ascontiguousarray(spoilt)))
        return error

    def spoil(self, pictures):
        return pictures


def _host(clip, output):
    """Return an output on the host, and views [T, C, h, w] of the one on the device."""
    if isinstance(output, DeviceRgb):
        return Rgb(np.empty(tuple(output.data.shape), np.uint8)), [output.data.transpose(0, 1)]
    t, h, w = output.y.shape
    half = (t, h // 2, w // 2)
    host = Planes(np.empty((t, h, w), np.uint8), np.empty(half, np.uint8), np.empty(half, np.uint8))
    return host, [output.y[:, None], output.uv.permute(0, 3, 1, 2)]


class Black(Posing):
    def spoil(self, pictures):
        levels = (0,) if len(pictures) == 1 else (16, 128)
        return [np.full_like(one, level) for one, level in zip(pictures, levels, strict=True)]


class Unwritten(Posing):
    """Leaves the last two frames as they were."""

    def spoil(self, pictures):
        return [one[:-2] for one in pictures]


class Stale(Posing):
    """Returns the pictures of the call before."""

    def spoil(self, pictures):
        before = getattr(self, "before", None)
        self.before = [one.copy() for one in pictures]
        fits = before is not None and all(old.shape == new.shape for old, new in zip(before, pictures, strict=True))
        return before if fits else pictures


class Swapped(Posing):
    """Exchanges red and blue, or U and V."""

    def spoil(self, pictures):
        return [one[:, ::-1] for one in pictures]


class UpsideDown(Posing):
    def spoil(self, pictures):
        return [one[:, :, ::-1] for one in pictures]


class Late(Posing):
    """Returns the frame before the requested one, from the second frame of a clip on."""

    def spoil(self, pictures):
        return [np.concatenate((one[:1], one[:-1])) for one in pictures]


class Shifted(Posing):
    """Moves the picture eight pixels to the right."""

    def spoil(self, pictures):
        return [np.roll(one, shift, 3) for one, shift in zip(pictures, (8, 4), strict=False)]


class FullRange(Posing):
    """Treats limited range as full range."""

    def spoil(self, pictures):
        if len(pictures) == 1:
            return [np.rint(pictures[0] * (219 / 255) + 16).astype(np.uint8)]
        return [np.rint(pictures[0] * (219 / 255) + 16).astype(np.uint8), pictures[1]]


SPOILED = (Black, Unwritten, Stale, Swapped, UpsideDown, Late, Shifted, FullRange)


def posing(kind: type, spoiled: type = Posing, bound: float = 1.5) -> Backend:
    """Return a back-end that writes one type of output on a device, which is the CPU."""
    made = type(f"{spoiled.__name__}{kind.__name__}", (spoiled,), {"outputs": frozenset({kind})})
    globals()[made.__name__] = made
    return Backend(made.__name__, f"{__name__}:{made.__name__}", "cpu", frozenset(Codec), "nothing", bound)
