"""Memory of a batch in the making: each clip goes to its stream's sink, decoded alone or cut out of a shared reading.

The rows of a canvas are those of the first stream, then those of the second, and so on; with views each row of a batch
is V consecutive rows of a stream. Beside it: patches of packed sequences, the sound of a batch, and the stage that
transforms RGB between decoding and normalisation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastvid.decode.colours import Layout, Pixels, empty_batch
from fastvid.decode.pyav import Recutter
from fastvid.decode.request import SLACK, DecoderOutput, Planes, Rgb
from fastvid.decode.sound import Audio
from fastvid.errors import UsageError
from fastvid.load.after.chain import TransformChain
from fastvid.load.batch.sinks import OpenSink, Sink
from fastvid.load.batch.spec import Video, VideoSpec
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.plan import SoundTask, sounding
from fastvid.load.device import LoaderStream, upload
from fastvid.load.memory import BufferPool, SharedBufferPool, SharedRow
from fastvid.load.options import Collate
from fastvid.load.order.draws import Draws
from fastvid.load.order.epoch import ClipShape
from fastvid.runtime.arrays import IntArray

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


@dataclass(frozen=True, slots=True)
class Patches:
    """How clips are cut into patches."""

    patch: ClipShape  # frames pt, height ph and width pw of a patch
    merge: int  # patches in each direction of a picture that follow each other; 1 for row after row
    layout: Layout

    def grids(self, clips: Sequence[Tensor]) -> IntArray:
        """Return the patches of each clip along time, height and width, int64 [n, 3].

        A clip without frames, as of a masked row, has `merge` x `merge` patches, because some attention kernels refuse
        empty sequences.
        """
        across = [1, self.merge, self.merge]
        steps = np.asarray(self.patch, dtype=np.int64) * np.asarray(across, dtype=np.int64)
        sides = np.asarray([[one.shape[axis] for axis in self._axes] for one in clips], dtype=np.int64)
        grids: IntArray = np.maximum(-(-sides // steps), 1) * np.asarray(across, dtype=np.int64)
        return grids

    def pack(self, clips: Sequence[Tensor]) -> tuple[Tensor, IntArray]:
        """Cut clips into patches.

        The values of a patch are in the order channel, time, row, column. The patches of a clip are in the order time,
        row, column; with `merge` in blocks of merge x merge patches, the blocks in that order and the patches within
        each of them. This is the order of Qwen2-VL's processor. Where a clip is not a multiple of the patch, its last
        frame is repeated, and zeros are added on the right and below.

        `clips`: tensors of one dtype and device, each [3, T, H, W] or [T, 3, H, W]; at least one. Returns the
        patches [N, 3 * pt * ph * pw], and `grids`.
        """
        grids = self.grids(clips)
        ends = np.cumsum(grids.prod(axis=1)).tolist()
        (pt, ph, pw), merge = self.patch, self.merge
        packed = clips[0].new_empty((ends[-1], 3 * pt * ph * pw))
        for clip, (t, h, w), end in zip(clips, grids.tolist(), ends, strict=True):
            into = packed[end - t * h * w : end]
            if not clip.numel():
                into.zero_()
                continue
            video = self._whole(clip if self.layout == "BCTHW" else clip.transpose(0, 1), (t * pt, h * ph, w * pw))
            blocks = video.view(3, t, pt, h // merge, merge, ph, w // merge, merge, pw)
            blocks = blocks.permute(1, 3, 6, 4, 7, 0, 2, 5, 8)
            into.view(blocks.shape).copy_(blocks)
        return packed, grids

    @property
    def _axes(self) -> tuple[int, int, int]:
        """Axes of frames, height and width of a clip."""
        return (1, 2, 3) if self.layout == "BCTHW" else (0, 2, 3)

    @staticmethod
    def _whole(video: Tensor, shape: ClipShape) -> Tensor:
        """Return a video [3, T, H, W] extended to a multiple of the patch."""
        frames, height, width = (side - own for side, own in zip(shape, video.shape[1:], strict=True))
        if frames:
            video = torch.cat([video, video[:, -1:].expand(-1, frames, -1, -1)], dim=1)
        if height or width:
            video = pad(video, (0, width, 0, height))
        return video


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


ClipDraws = tuple[Draws, int]
"""The random numbers of a clip's sample, and the number of the clip among its views."""

_NO_DRAWS: Final[ClipDraws] = (Draws(0, 0, 0), 0)

# Values 0 to 1 without normalisation, as transforms expect them.
_UNIT: Final = Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class TransformStage:
    """Applies the transforms of a loader to the RGB of its batches, then normalises it."""

    chain: TransformChain
    spec: VideoSpec

    @property
    def decoded(self) -> VideoSpec:
        """What decoders make for the transforms: float32 RGB in 0 to 1, [B, 3, T, H, W] or a list of [3, T, H, W]."""
        collate: Collate = "stack" if self.spec.collate == "stack" else "list"
        return VideoSpec(self.spec.shape, "BCTHW", _UNIT, self.spec.stream, collate=collate)

    def finish(
        self,
        video: Video,
        clips: Sequence[BatchRow | None],
        planned: ClipShape | None,
        draws: Sequence[ClipDraws | None],
    ) -> Video:
        """Return the video of a batch; masked rows are zero.

        `clips`: the planned clip of each row. `planned`: the shape that the plan gives all rows, if any.
        `draws`: the random numbers of each row; None for a masked row.
        """
        if isinstance(video, Tensor):
            return self._stacked(video, draws)
        made = [
            self._empty(1, clip.shape[1:]).zero_()[0] if one is None else self._stacked(clip[None], [one])[0]
            for clip, one in zip(video, draws, strict=True)
        ]
        if self.spec.collate == "list":
            return made
        shapes = self.spec.shapes(clips, planned)
        for clip, (_, *size) in zip(made, shapes.rows, strict=True):
            if list(clip.shape[2:]) != size:
                raise UsageError(
                    f"the transforms {self.chain} resized a clip of {size} to {list(clip.shape[2:])} pixels",
                    hint="keep the size, or use collate='list'",
                )
        return self.spec.collated(made, replace(shapes, padded=shapes.padded or shapes.uniform))

    def _stacked(self, video: Tensor, draws: Sequence[ClipDraws | None]) -> Tensor:
        rows = [row for row, one in enumerate(draws) if one is not None]
        whole = len(rows) == len(video)
        # Row by row, because a list of rows would be copied to the device, and the host would wait for that. If every
        # row is masked, one is transformed to learn the size of the result.
        chosen = video if whole else torch.stack([video[row] for row in rows or [0]])
        made = self.chain.apply(chosen, [one for one in draws if one is not None] or [_NO_DRAWS])
        made = self._normalised(made)
        spec = self.spec
        dtype = torch.uint8 if spec.pixels is None else spec.pixels.dtype
        if whole and made.dtype is dtype and spec.layout == "BCTHW" and not spec.channels_last:
            return made
        out = self._empty(len(video), made.shape[2:])
        target = out if spec.layout == "BCTHW" else out.transpose(1, 2)
        if whole:
            target.copy_(made)
        else:
            out.zero_()
            for row, clip in zip(rows, made, strict=False):
                target[row] = clip
        return out

    def _normalised(self, clips: Tensor) -> Tensor:
        """Normalise clips in place, float32 [N, 3, T, H, W]; as levels 0 to 255 if that is what the batch gets."""
        pixels = self.spec.pixels
        if pixels is None:
            return clips.mul_(255).round_().clamp_(0, 255)
        numbers = [
            [1 / std for std in pixels.std],
            [-mean / std for mean, std in zip(pixels.mean, pixels.std, strict=True)],
        ]
        scale, bias = upload(torch.tensor(numbers, dtype=torch.float32), clips.device).view(2, 3, 1, 1, 1)
        return clips.mul_(scale).add_(bias)

    def _empty(self, count: int, shape: Sequence[int]) -> Tensor:
        spec = self.spec
        dtype = torch.uint8 if spec.pixels is None else spec.pixels.dtype
        whole = (count, 3, shape[0], shape[1], shape[2])
        return empty_batch(whole, spec.layout, dtype, spec.stream.device, channels_last=spec.channels_last)
