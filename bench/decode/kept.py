"""What rival decoders share: decoders that are kept open, the crop, and the output of a clip."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from fastvid.decode.request import ClipRequest
from fastvid.runtime.arrays import UInt8Array


class OpenDecoders:
    """Decoders by sample. The least recently used is closed when there are too many."""

    def __init__(self, opened: Callable[[int], Any], most: int) -> None:
        self._opened, self._most = opened, most
        self._found: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, sample: int) -> Any:
        if not self._most:
            return self._opened(sample)
        if sample in self._found:
            self._found.move_to_end(sample)
        else:
            self._found[sample] = self._opened(sample)
            if len(self._found) > self._most:
                self._found.popitem(last=False)
        return self._found[sample]


def cut(frames: UInt8Array, request: ClipRequest) -> UInt8Array:
    """Return the crop of frames [T, H, W, 3], as a view."""
    box = request.box
    return frames[:, box.y : box.y + box.height, box.x : box.x + box.width]


def output_of(request: ClipRequest, *, planes: bool = False) -> UInt8Array:
    """Allocate RGB [T, H, W, 3], or YUV [T, H * 3 / 2, W], for clips of the same shape as this one."""
    box = request.box
    shape = (box.height * 3 // 2, box.width) if planes else (box.height, box.width, 3)
    return np.empty((len(request.frames), *shape), np.uint8)
