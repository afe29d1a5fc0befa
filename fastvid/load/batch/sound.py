"""The memory of a batch's sound, and its tensors on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fastvid.audio.window import Audio
from fastvid.load.clips.clip import BatchRow
from fastvid.load.clips.sound import SoundTask, sounding
from fastvid.load.memory.buffers import BufferPool, SharedBufferPool
from fastvid.load.memory.device import LoaderStream


class SoundMemory:
    """Allocates the sound of batches."""

    def __init__(self, audio: Audio, pool: BufferPool, stream: LoaderStream) -> None:
        self.audio, self.stream = audio, stream
        self._pool = pool
        self._is_pinned = stream.is_asynchronous and not isinstance(pool, SharedBufferPool)

    def open(self, clips: Sequence[BatchRow | None], rows: int, samples: int) -> BatchSound:
        """Allocate the sound of a batch.

        `rows`: rows of the batch. `samples`: samples of the longest sound of the global batch.
        """
        size = rows * samples * (4 * self.audio.channels + 1)
        if self._is_pinned:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            host = torch.from_numpy(self._pool.take(max(1, size))[:size])
        return BatchSound(self, host.zero_(), clips, rows, samples)


class BatchSound:
    """The sound of one batch in the making."""

    def __init__(
        self, memory: SoundMemory, host: Tensor, clips: Sequence[BatchRow | None], rows: int, samples: int
    ) -> None:
        self._memory, self._host, self._shape = memory, host, (rows, memory.audio.channels, samples)
        data, mask = self._split(host)
        values, heard = data.numpy(), mask.numpy()
        tasks: defaultdict[int, list[SoundTask]] = defaultdict(list)
        for row, clip in sounding(clips, rows):
            assert clip.window is not None
            tasks[(clip.read or clip).row].append(SoundTask(clip.window, values[row], heard[row], clip))
        self.tasks: Mapping[int, Sequence[SoundTask]] = tasks

    def finish(self, failed: Collection[int]) -> dict[str, Tensor]:
        """Return the entries of the batch, on the device. Called once, within `LoaderStream.use`.

        `failed`: rows that failed, which become silent.
        """
        data, mask = self._split(self._memory.stream.upload(self._host))
        for row in failed:
            data[row].zero_()
            mask[row].zero_()
        # From here on only the tensors keep the memory alive.
        del self._host, self.tasks
        return {"audio": data, "audio_mask": mask}

    def _split(self, block: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, samples = self._shape
        stop = 4 * int(np.prod(self._shape))
        return block[:stop].view(torch.float32).view(self._shape), block[stop:].view(torch.bool).view(rows, samples)
