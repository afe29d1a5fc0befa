"""`Canvas`: one batch in the making, into which clips are decoded alone or cut out of a shared reading."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence, Set
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from fastvid.decode.pyav import Recutter
from fastvid.decode.request import SLACK, DecoderOutput, EncodedClip, Planes, Rgb, packed_size
from fastvid.decode.sound import Audio
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.sinks import OpenSink, Sink
from fastvid.load.batch.spec import Video
from fastvid.load.clips.plan import Plan, SoundTask
from fastvid.load.device import LoaderStream
from fastvid.load.memory import BufferPool, SharedBufferPool, SharedRow
from fastvid.load.stats import Counters

# Outputs that a `Recutter` can write.
_CUT: Final = frozenset({Planes, Rgb})


class CanvasMemory:
    """Opens the canvas of each batch, and keeps the memory that canvases reuse.

    `streams`: the sinks of each stream. `pool`: of sound. `threads`: threads that decode.
    """

    def __init__(
        self, streams: Sequence[Sequence[OpenSink]], stream: LoaderStream, pool: BufferPool, threads: int
    ) -> None:
        self.streams, self.stream, self.pool = streams, stream, pool
        self.planes = BufferPool(threads)
        self.recutters: deque[Recutter] = deque()

    def open(self, plan: Plan) -> Canvas:
        """Open the canvas of a plan."""
        with self.stream.use():
            return Canvas(self, plan)


class Canvas:
    """One batch in the making: what was read and decoded so far. `output` and `done` may be called from any thread."""

    def __init__(self, memory: CanvasMemory, plan: Plan) -> None:
        self.plan, self._memory, self._rows = plan, memory, len(plan.lengths)
        self.place, self.request = plan.place, plan.request
        self._sinks = [[open_sink(plan, number) for open_sink in sinks] for number, sinks in enumerate(memory.streams)]
        self.sound = None if plan.rules.audio is None else BatchSound(memory, plan.rules.audio, plan)
        self.sounds: dict[int, Sequence[SoundTask]] = {} if self.sound is None else self.sound.tasks
        """The sounds of each canvas row that is decoded, with their packets once they are read."""
        self.packets: dict[int, EncodedClip] = {}
        """What was read for canvas rows, until they are decoded."""
        self.errors = dict(plan.errors)
        self.counters = Counters()
        self.pending = len(plan.reads)
        self.finished: tuple[Batch, torch.cuda.Event | None] | None = None
        self._planes: dict[int, Planes] = {}
        self._taken: dict[int, Sink] = {}

    def output(self, row: int, kinds: Set[type]) -> DecoderOutput | SharedRow:
        """Return where to write a clip: memory for a decoder that writes some of `kinds`, or a process's whole row."""
        if self.plan.reads[row] == row + 1:
            return self._part(row, kinds)
        request = self.plan.request(row)
        count, size = len(request.frames), packed_size(request)
        self._planes[row] = Planes.packed(self._memory.planes.take(size + SLACK)[:size], count, request.box)
        return self._planes[row]

    def done(self, row: int, error: Exception | None) -> None:
        """Mark a row as decoded, or as failed: it becomes zeros. Called by the thread that decoded it."""
        plan, planes = self.plan, self._planes.pop(row, None)
        rows = range(row, plan.reads[row])
        if error is not None:
            self.errors.update(dict.fromkeys(rows, error))
        elif planes is not None:
            try:
                recutter = self._memory.recutters.pop()
            except IndexError:
                recutter = Recutter()
            whole = plan.request(row)
            for number in rows:
                part = plan.part(number)
                index = np.searchsorted(whole.frames, part.frames).tolist()
                output = cast("DecoderOutput", self._part(number, _CUT))
                recutter.cut(plan.info(row), whole.box, planes, index, part, output)
            self._memory.recutters.append(recutter)
        for number in rows:
            taken = self._taken.get(number)
            # If the row went into the other sink, this one gets zeros there.
            for sink in self._sinks[number // self._rows]:
                sink.done(number % self._rows, good=error is None and sink is taken)

    def finish(self) -> list[Video]:
        """Return each stream on its device. Called once, after every row is done, within `LoaderStream.use`."""
        return [self._finish(number * self._rows, sinks) for number, sinks in enumerate(self._sinks)]

    def _part(self, row: int, kinds: Set[type]) -> DecoderOutput | SharedRow:
        sinks = self._sinks[row // self._rows]
        (sink, *_) = sinks if len(sinks) == 1 else [one for one in sinks if one.kinds & kinds]
        self._taken[row] = sink
        return sink.output(row % self._rows, kinds)

    def _finish(self, first: int, sinks: Sequence[Sink]) -> Video:
        video = sinks[0].finish()
        for sink in sinks[1:]:
            other = sink.finish()
            # Row by row, because a list of rows would be copied to the device, and the host would wait for that.
            for row in range(self._rows):
                if self._taken.get(first + row) is sink:
                    video[row] = other[row]
        return video


class BatchSound:
    """The sound of one batch in the making."""

    def __init__(self, memory: CanvasMemory, audio: Audio, plan: Plan) -> None:
        rows, samples = len(plan.samples), plan.sound_samples
        self._stream, self._shape = memory.stream, (rows, audio.channels, samples)
        size = rows * samples * (4 * audio.channels + 1)
        if self._stream.is_asynchronous and not isinstance(memory.pool, SharedBufferPool):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            host = torch.from_numpy(memory.pool.take(max(1, size))[:size])
        self._host = host.zero_()
        data, mask = self._split(host)
        values, heard = data.numpy(), mask.numpy()
        # With views there is no sound, so rows of the first stream are rows of the batch.
        self.tasks: dict[int, Sequence[SoundTask]] = {
            first: [SoundTask(plan.windows[row], values[row], heard[row]) for row in range(first, stop)]
            for first, stop in plan.reads.items()
            if first < rows
        }

    def finish(self, failed: Collection[int]) -> dict[str, Tensor]:
        """Return the entries of the batch, on the device. Called once, within `LoaderStream.use`.

        `failed`: rows that failed, which become silent.
        """
        data, mask = self._split(self._stream.upload(self._host))
        for row in failed:
            data[row].zero_()
            mask[row].zero_()
        # From here on only the tensors keep the memory alive.
        self.tasks.clear()
        del self._host
        return {"audio": data, "audio_mask": mask}

    def _split(self, block: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, samples = self._shape
        stop = 4 * int(np.prod(self._shape))
        return block[:stop].view(torch.float32).view(self._shape), block[stop:].view(torch.bool).view(rows, samples)
