"""Memory of a batch in the making: each clip goes to its stream's sink, decoded alone or cut out of a shared reading.

The rows of a canvas are those of the first stream, then those of the second, and so on; with views each row of a batch
is V consecutive rows of a stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from typing import Final, cast

import numpy as np

from fastvid.decode.recut import SLACK, Recutter
from fastvid.decode.request import DecoderOutput, Planes, Rgb
from fastvid.load.batch.sinks import OpenSink, Sink
from fastvid.load.batch.video import Video
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.memory.buffers import BufferPool
from fastvid.load.memory.device import LoaderStream
from fastvid.load.memory.row_layout import SharedRow
from fastvid.load.order.batches import ClipShape

# Outputs that a `Recutter` can write.
_CUT: Final = frozenset({Planes, Rgb})


class Finisher:
    """Opens the canvas of each batch, and keeps the memory that canvases reuse."""

    def __init__(self, streams: Sequence[Sequence[OpenSink]], *, threads: int, stream: LoaderStream) -> None:
        self.streams, self.stream = streams, stream
        self.planes = BufferPool(threads)
        self.recutters: deque[Recutter] = deque()

    def open(self, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> Canvas:
        """Open a canvas for these rows; None is a masked row, which stays zero.

        `clips`: the rows. `shape`: shape that all rows get, if the plan decides it.
        """
        with self.stream.use():
            return Canvas(self, clips, shape)


class Canvas:
    """The memory of one batch. `output` and `done` may be called from any thread."""

    def __init__(self, finisher: Finisher, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        self._finisher = finisher
        rows = self._rows = len(clips) // len(finisher.streams)
        self._sinks = [
            [open_sink(clips[number * rows : (number + 1) * rows], shape) for open_sink in sinks]
            for number, sinks in enumerate(finisher.streams)
        ]
        reads = (clip.read for clip in clips if isinstance(clip, Clip) and clip.read is not None)
        self._reads = {read.row: read for read in reads}
        self._planes: dict[int, Planes] = {}
        self._taken: dict[int, Sink] = {}

    def output(self, row: int, kinds: Set[type]) -> DecoderOutput | SharedRow:
        """Return where to write a clip: memory for a decoder that writes some of `kinds`, or a process's whole row."""
        read = self._reads.get(row)
        if read is None:
            return self._part(row, kinds)
        count, box = len(read.request.frames), read.request.box
        size = Planes.nbytes(count, box)
        self._planes[row] = Planes.packed(self._finisher.planes.take(size + SLACK)[:size], count, box)
        return self._planes[row]

    def done(self, row: int, *, good: bool) -> None:
        """Mark a row as decoded, or (not `good`) as failed: it becomes zeros. Called by the thread that decoded it."""
        read, planes = self._reads.get(row), self._planes.pop(row, None)
        if read is None:
            self._part_done(row, good=good)
            return
        try:
            recutter = self._finisher.recutters.pop()
        except IndexError:
            recutter = Recutter()
        for part in read.parts:
            if good:
                assert planes is not None
                index = np.searchsorted(read.request.frames, part.request.frames).tolist()
                output = cast("DecoderOutput", self._part(part.row, _CUT))
                recutter.cut(read.info, read.request.box, planes, index, part.request, output)
            self._part_done(part.row, good=good)
        self._finisher.recutters.append(recutter)

    def finish(self) -> list[Video]:
        """Return each stream on its device. Called once, after every row is done, within `LoaderStream.use`."""
        return [self._finish(number * self._rows, sinks) for number, sinks in enumerate(self._sinks)]

    def _part(self, row: int, kinds: Set[type]) -> DecoderOutput | SharedRow:
        sinks = self._sinks[row // self._rows]
        sink = self._taken[row] = next(one for one in sinks if one.kinds & kinds)
        return sink.output(row % self._rows, kinds)

    def _part_done(self, row: int, *, good: bool) -> None:
        taken = self._taken.get(row)
        # If the row went into the other sink, this one gets zeros there.
        for sink in self._sinks[row // self._rows]:
            sink.done(row % self._rows, good=good and sink is taken)

    def _finish(self, first: int, sinks: Sequence[Sink]) -> Video:
        video = sinks[0].finish()
        for sink in sinks[1:]:
            other = sink.finish()
            # Row by row, because a list of rows would be copied to the device, and the host would wait for that.
            for row in range(self._rows):
                if self._taken.get(first + row) is sink:
                    video[row] = other[row]
        return video
