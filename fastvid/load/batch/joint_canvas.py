"""The memory of clips that are decoded together: planes of all frames, and each clip cut out into its own row."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from typing import Final

import numpy as np
import torch

from fastvid.decode.recut import SLACK, Recutter
from fastvid.decode.request import Output, Planes, Rgb
from fastvid.load.batch.canvases import Canvas, Finisher
from fastvid.load.clips.clip import Clip, Row, decided
from fastvid.load.memory.buffers import BufferPool

# What a `Recutter` writes.
_CUT: Final = frozenset({Planes, Rgb})


class TogetherFinisher:
    """Cuts merged clips apart, for a finisher of single ones.

    Args:
        inner: Makes the batches' memory.
        num_views: Rows of `inner` for each row of the batch.
        threads: Threads that decode at once.
    """

    def __init__(self, inner: Finisher, *, num_views: int, threads: int) -> None:
        self.inner, self.num_views = inner, num_views
        self.planes = BufferPool(threads)
        self.recutters: deque[Recutter] = deque()

    def open(self, clips: Sequence[Row | None]) -> Canvas:
        """See `Finisher`."""
        rows: list[Clip | None] = [None] * (len(clips) * self.num_views)
        reads: dict[int, Clip] = {}
        for row, clip in enumerate(decided(clips)):
            if clip is None:
                continue
            if clip.read is None:
                rows[row] = clip
                continue
            reads[clip.read.row] = clip.read
            for part in clip.read.parts:
                rows[part.row] = part
        return _TogetherCanvas(self, self.inner.open(rows), reads)


class _TogetherCanvas:
    def __init__(self, finisher: TogetherFinisher, inner: Canvas, reads: dict[int, Clip]) -> None:
        self._finisher, self._inner, self._reads = finisher, inner, reads
        self._planes: dict[int, Planes] = {}

    def output(self, row: int, kinds: Set[type]) -> Output:
        read = self._reads.get(row)
        if read is None:
            return self._inner.output(row, kinds)
        count, box = len(read.request.frames), read.request.box
        size = Planes.nbytes(count, box)
        planes = Planes.packed(self._finisher.planes.take(size + SLACK)[:size], count, box)
        self._planes[row] = planes
        return planes

    def done(self, row: int, *, good: bool) -> None:
        read, planes = self._reads.get(row), self._planes.pop(row, None)
        if read is None:
            self._inner.done(row, good=good)
            return
        try:
            recutter = self._finisher.recutters.pop()
        except IndexError:
            recutter = Recutter()
        for part in read.parts:
            if good:
                assert planes is not None
                index = np.searchsorted(read.request.frames, part.request.frames).tolist()
                output = self._inner.output(part.row, _CUT)
                recutter.cut(read.info, read.request.box, planes, index, part.request, output)
            self._inner.done(part.row, good=good)
        self._finisher.recutters.append(recutter)

    def finish(self) -> torch.Tensor:
        video = self._inner.finish()
        views = self._finisher.num_views
        return video if views == 1 else video.view(-1, views, *video.shape[1:])
