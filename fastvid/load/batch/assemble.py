"""Finishes batches: transforms RGB, cuts packed sequences into patches, and adds the entries besides the pictures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastvid.decode.colours import Layout, Pixels
from fastvid.errors import UsageError
from fastvid.format.schema import FLOW, PICTURES
from fastvid.load.after.chain import TransformChain
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.canvas import Canvas
from fastvid.load.batch.spec import Spec, Video, VideoSpec
from fastvid.load.clips.plan import Plan
from fastvid.load.device import LoaderStream, upload
from fastvid.load.options import Collate
from fastvid.load.order.draws import Draws
from fastvid.load.order.epoch import MASKED, ClipShape
from fastvid.load.order.packed import Packed
from fastvid.runtime.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Patches:
    """How clips are cut into patches."""

    patch: ClipShape  # frames pt, height ph and width pw of a patch
    merge: int  # patches are stored in blocks of merge x merge patches of a picture; 1 stores them row by row
    layout: Layout

    def pack(self, clips: Sequence[Tensor]) -> tuple[Tensor, IntArray]:
        """Cut clips into patches.

        The values of a patch are in the order channel, time, row, column. The patches of a clip are in the order time,
        row, column; with `merge` in blocks of merge x merge patches, the blocks in that order and the patches within
        each of them. This is the order of Qwen2-VL's processor. A clip whose sides are not multiples of the patch is
        extended: its last frame is repeated, and zeros are added on the right and below. A clip without frames, as of a
        masked row, has `merge` x `merge` patches, because some attention kernels refuse empty sequences.

        `clips`: tensors of one dtype and device, each [3, T, H, W] or [T, 3, H, W]; at least one. Returns the
        patches [N, 3 * pt * ph * pw], and how many each clip has along time, height and width, int64 [n, 3].
        """
        clips = clips if self.layout == "BCTHW" else [clip.transpose(0, 1) for clip in clips]
        (pt, ph, pw), merge = self.patch, self.merge
        across = np.array([1, merge, merge])
        sides = np.array([clip.shape[1:] for clip in clips])
        grids: IntArray = np.maximum(-(-sides // (np.array(self.patch) * across)), 1) * across
        ends = np.cumsum(grids.prod(axis=1)).tolist()
        packed = clips[0].new_empty((ends[-1], 3 * pt * ph * pw))
        for clip, (t, h, w), end in zip(clips, grids.tolist(), ends, strict=True):
            into = packed[end - t * h * w : end]
            if not clip.numel():
                into.zero_()
                continue
            video = self._whole(clip, (t * pt, h * ph, w * pw))
            blocks = video.view(3, t, pt, h // merge, merge, ph, w // merge, merge, pw)
            blocks = blocks.permute(1, 3, 6, 4, 7, 0, 2, 5, 8)
            into.view(blocks.shape).copy_(blocks)
        return packed, grids

    @staticmethod
    def _whole(video: Tensor, shape: ClipShape) -> Tensor:
        """Return a video [3, T, H, W] extended to a multiple of the patch."""
        frames, height, width = (side - own for side, own in zip(shape, video.shape[1:], strict=True))
        if frames:
            video = torch.cat([video, video[:, -1:].expand(-1, frames, -1, -1)], dim=1)
        if height or width:
            video = pad(video, (0, width, 0, height))
        return video


ClipDraws = tuple[Draws, int]
"""The random numbers of a clip's sample, and the index of the clip among the views of the sample."""

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
        return VideoSpec(self.spec.shape, "BCTHW", _UNIT, self.spec.stream, collate=collate, resize=self.spec.resize)

    def finish(
        self, video: Video, rows: IntArray, planned: ClipShape | None, draws: Sequence[ClipDraws | None]
    ) -> Video:
        """Return the video of a batch; masked rows are zero.

        `rows`: shape (T, H, W) of each clip, int64 [N, 3]. `planned`: the shape of all rows, if the plan decides it.
        `draws`: the random numbers of each row; None for a masked row.
        """
        if isinstance(video, Tensor):
            return self._stacked(video, draws)
        made = [
            self._stacked(clip[None], [one])[0]
            if one
            else self.spec.empty((1, *clip.shape), self.spec.dtype).zero_()[0]
            for clip, one in zip(video, draws, strict=True)
        ]
        if self.spec.collate == "list":
            return made
        shapes = self.spec.shapes(rows, planned)
        for clip, (_, *size) in zip(made, shapes.rows, strict=True):
            if list(clip.shape[2:]) != size:
                told = f"the transforms {self.chain} resized a clip of {size} to {list(clip.shape[2:])} pixels"
                raise UsageError(told, hint="keep the size, or use collate='list'")
        return self.spec.collated(made, replace(shapes, padded=shapes.padded or shapes.uniform))

    def _stacked(self, video: Tensor, draws: Sequence[ClipDraws | None]) -> Tensor:
        rows = [row for row, one in enumerate(draws) if one is not None]
        whole = len(rows) == len(video)
        # Copied row by row: an index list would be copied to the device, and the host would wait for that. If every
        # row is masked, one is transformed to learn the size of the result.
        chosen = video if whole else torch.stack([video[row] for row in rows or [0]])
        made = self.chain.apply(chosen, [one for one in draws if one is not None] or [_NO_DRAWS])
        made = self._normalised(made)
        spec = self.spec
        if whole and made.dtype is spec.dtype and spec.layout == "BCTHW" and not spec.channels_last:
            return made
        out = spec.empty((len(video), *made.shape[1:]), spec.dtype)
        target = out if spec.layout == "BCTHW" else out.transpose(1, 2)
        if whole:
            target.copy_(made)
        else:
            out.zero_()
            for row, clip in zip(rows, made, strict=False):
                target[row] = clip
        return out

    def _normalised(self, clips: Tensor) -> Tensor:
        """Normalise clips in place, float32 [N, 3, T, H, W]; for a batch of uint8, scale them to 0 to 255 instead."""
        pixels = self.spec.pixels
        if pixels is None:
            return clips.mul_(255).round_().clamp_(0, 255)
        numbers = [
            [1 / std for std in pixels.std],
            [-mean / std for mean, std in zip(pixels.mean, pixels.std, strict=True)],
        ]
        scale, bias = upload(torch.tensor(numbers, dtype=torch.float32), clips.device).view(2, 3, 1, 1, 1)
        return clips.mul_(scale).add_(bias)


class Assembler:
    """Makes the batches of a loader from complete canvases."""

    def __init__(self, spec: Spec, video: VideoSpec) -> None:
        self._spec, self._rules, self._stream = spec, spec.rules, video.stream
        self._views = () if spec.rules.views is None else (spec.rules.num_views,)
        self.stage = None if spec.after is None else TransformStage(spec.after, video)
        packed = spec.batches
        self._patches = Patches(packed.patch, packed.merge, video.layout) if isinstance(packed, Packed) else None

    @property
    def uses_global_generators(self) -> bool:
        """Whether `make` seeds global random generators for a while, so that only the consumer's thread may run it."""
        return self.stage is not None and self.stage.chain.uses_global_generators

    def make(self, canvas: Canvas) -> tuple[Batch, torch.cuda.Event | None]:
        """Finish a batch whose rows are all decoded or failed. The host does not wait for the loader's stream.

        Returns the batch, and an event after its last operation; None on a CPU.
        """
        plan, streams = canvas.plan, self._rules.streams
        with self._stream.use():
            # If one stream or view of a clip failed, the whole clip failed.
            failed = set(map(plan.row_of, canvas.errors))
            made = [self._transformed(number, video, plan, failed) for number, video in enumerate(canvas.finish())]
            for video in made:
                for row in failed:
                    video[row].zero_()
            batch = self._assemble(dict(zip(streams, made, strict=True)), plan, failed)
            batch.update({} if canvas.sound is None else canvas.sound.finish(failed))
            return batch, self._stream.mark()

    def _transformed(self, number: int, video: Video, plan: Plan, failed: Collection[int]) -> Video:
        stream = self._rules.streams[number]
        if self.stage is not None and stream != FLOW and stream not in self._rules.depth:
            draws = [
                None if sample == MASKED or row in failed else (plan.draws[row], view)
                for row, sample in enumerate(plan.samples.tolist())
                for view in range(self._rules.num_views)
            ]
            video = self.stage.finish(video, plan.shapes(number), plan.share.shape, draws)
        return video.view(-1, *self._views, *video.shape[1:]) if isinstance(video, Tensor) and self._views else video

    def _assemble(self, streams: Mapping[str, Video], plan: Plan, failed: Collection[int]) -> Batch:
        spec, samples, valid, share = self._spec, plan.samples, plan.valid.copy(), plan.share
        valid[list(failed)] = False
        clips = np.repeat(valid, self._rules.num_views)
        longest = plan.num_frames or int(plan.lengths[clips].max(initial=1))
        shape = (len(samples), *self._views, longest)
        frames = np.where(clips[:, None], plan.frames[:, :longest], -1).reshape(shape)
        seconds = np.where(clips[:, None], plan.seconds[:, :longest], -1).reshape(shape)
        # The weights of all ranks add up to one.
        weight = np.where(valid, 1.0 / (share.stop - share.start), 0).astype(np.float32)
        small: dict[str, npt.NDArray[Any]] = spec.annotations.on_device(samples, valid)
        small |= {"weight": weight, "valid": valid}
        small |= {} if spec.signals is None else spec.signals.rows(samples, valid, frames)
        if spec.output.collate == "pad":
            small["mask"] = frames >= 0
        video, plain = streams[self._rules.streams[0]], dict[str, Any]()
        if self._patches is not None:
            assert isinstance(video, list)
            assert share.bins is not None
            video, small["grid"] = self._patches.pack(video)
            lengths = small["grid"].prod(axis=1)
            small["cu_seqlens"] = np.append(0, np.cumsum(lengths)).astype(np.int32)
            plain = {"max_seqlen": int(lengths.max()), "bins": torch.from_numpy(share.bins)}
        small = dict(sorted(small.items(), key=lambda item: -item[1].itemsize))
        return Batch(
            {"video": video}
            | {name: one for name, one in streams.items() if not name == PICTURES == self._rules.streams[0]}
            | dict(zip(small, _upload(tuple(small.values()), self._stream), strict=True))
            | plain,
            key=tuple(plan.keys),
            frame_index=torch.from_numpy(frames),
            seconds=torch.from_numpy(seconds),
            fps=torch.from_numpy(plan.rates[:, 0] / np.abs(plan.rates[:, 1])),
            clip_fps=torch.from_numpy(_rates(frames, seconds)),
            size=torch.from_numpy(plan.sizes[self._rules.main]),
            sample=torch.from_numpy(samples),
            position=torch.from_numpy(share.positions),
            epoch=plan.draws.epoch,
            start=share.start,
            stop=share.stop,
            **spec.annotations.on_host(samples, plan.draws),
        )


def _rates(frames: IntArray, seconds: FloatArray) -> FloatArray:
    """Return the mean frames per second of clips, float64 [...]; -1 for a clip of no frames or of a single moment."""
    shown = frames >= 0
    spans = seconds.max(axis=-1) - np.where(shown, seconds, np.inf).min(axis=-1)
    rates: FloatArray = np.full(spans.shape, -1.0)
    np.divide(shown.sum(axis=-1) - 1, spans, out=rates, where=spans > 0)
    return rates


def _upload(parts: Sequence[npt.NDArray[Any]], stream: LoaderStream) -> list[Tensor]:
    """Return arrays as tensors on the device: views of one block that is copied once."""
    tensors = list(map(torch.from_numpy, parts))
    stops = np.cumsum([part.nbytes for part in parts]).tolist()
    host = torch.empty(stops[-1], dtype=torch.uint8, pin_memory=stream.is_asynchronous)
    views = [slice(stop - part.nbytes, stop) for part, stop in zip(parts, stops, strict=True)]
    for tensor, view in zip(tensors, views, strict=True):
        host[view].view(tensor.dtype)[:] = tensor.reshape(-1)
    block = upload(host, stream.device)
    return [block[view].view(one.dtype).view(one.shape) for one, view in zip(tensors, views, strict=True)]
