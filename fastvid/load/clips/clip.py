"""`ClipRules`: how clips are made of samples; and the sizes of all clips, computed before anything is read.

All streams of a sample show the same moments: frame f of one camera is frame f of another. A clip's flow covers the
same frames and the same crop as its pictures. Each frame has a stack of L flow pictures, half before and half after it,
as in the temporal network of two-stream models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from fastvid.decode.sound import Audio
from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.packets import StreamInfo
from fastvid.format.planes import DepthScale
from fastvid.format.schema import FLOW, PICTURES
from fastvid.load.clips.crops import Size, Spatial, Transform
from fastvid.load.clips.sampling import Sampler, clip_length, clip_lengths
from fastvid.load.clips.timed_sampling import Deltas
from fastvid.load.clips.views import Views
from fastvid.load.order.buckets import ClipSizes
from fastvid.load.order.epoch import ClipShape, EveryFrame
from fastvid.load.order.mixture import Mixture, part_of, parts_of
from fastvid.runtime.arrays import AnyArray, IntArray
from fastvid.runtime.values import check_kind, check_least

Frames = Sampler | Mapping[str, Sampler]
"""A sampler, or one for each dataset of a mixture by name."""

Crops = Sequence[Transform] | Transform | Mapping[str, Sequence[Transform] | Transform]
"""A crop with at most one flip, or those of each dataset of a mixture by name."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class ClipRules:
    """The samplers, crops, streams and views with which clips are made of samples."""

    samplers: tuple[Sampler, ...]  # sampler of each dataset, or one for all samples
    spatials: tuple[Spatial, ...]  # transforms of each dataset, or one for all samples
    # one past the last sample of each dataset; empty if there is one sampler and one crop for all samples.
    ends: tuple[int, ...] = ()
    streams: tuple[str, ...] = (PICTURES,)
    flow_stack: int = 1
    depth: Mapping[str, DepthScale] = field(default_factory=dict)  # the streams that show depth
    views: Views | None = None  # the clips and crops of each sample; None for one of each, without an axis of views
    audio: Audio | None = None

    @classmethod
    def of(
        cls,
        dataset: Dataset | Mixture,
        frames: Frames,
        spatial: Crops,
        streams: Sequence[str] | str | None = None,
        flow_stack: int = 1,
        views: Views | None = None,
        audio: Audio | None = None,
    ) -> ClipRules:
        """Build from a loader's arguments."""
        if isinstance(dataset, Mixture) and any(isinstance(part, EveryFrame) for part in dataset.datasets):
            hint = "use one EveryFrame alone, of a dataset that `fastvid merge` makes of all"
            raise UsageError("a part of the mixture is an EveryFrame", hint=hint)
        if isinstance(dataset, EveryFrame) and (not isinstance(frames, Deltas) or frames.anchor is not None):
            raise UsageError(
                f"frames is {frames!r}, which does not choose frames relative to an item of EveryFrame",
                hint="use frames=Deltas([...]) without an anchor: the seconds are counted from each item",
            )
        for sampler in frames.values() if isinstance(frames, Mapping) else [frames]:
            if not hasattr(sampler, "draw") or isinstance(sampler, type):
                count = sampler if isinstance(sampler, int) else 8
                hint = f"use Segments({count}), Uniform({count}) or Dense({count}, stride)"
                raise UsageError(f"frames is {sampler!r}, which is no sampler", hint=hint)
        names = check_streams(streams, flow_stack, dataset.streams)
        options = (names, flow_stack, depth_of(dataset, names), views, audio)
        if not isinstance(frames, Mapping) and not isinstance(spatial, Mapping):
            return cls((frames,), (Spatial.of(spatial),), (), *options)
        if not isinstance(dataset, Mixture):
            argument = "frames" if isinstance(frames, Mapping) else "spatial"
            hint = f"give one {argument} for all samples, or a Mixture of datasets with these names"
            raise UsageError(f"{argument} is a mapping, but the dataset is not a mixture", hint=hint)
        samplers = dataset.by_name("frames", frames) if isinstance(frames, Mapping) else (frames,) * len(dataset.names)
        crops = dataset.by_name("spatial", spatial) if isinstance(spatial, Mapping) else (spatial,) * len(dataset.names)
        return cls(samplers, tuple(Spatial.of(crop) for crop in crops), dataset.ends, *options)

    @cached_property
    def num_views(self) -> int:
        """Clips of each sample and stream."""
        return 1 if self.views is None else self.views.num_views

    @cached_property
    def main(self) -> int:
        """Index of the stream whose rate, size and times a batch reports: the pictures, or else the first."""
        return self.streams.index(PICTURES) if PICTURES in self.streams else 0

    @property
    def shape(self) -> ClipShape | None:
        """Frames, height and width of every clip; None if they depend on the video, its dataset or its bucket."""
        count, size = self.num_frames, self.output
        return None if count is None or size is None else (count, *size)

    @property
    def pairs(self) -> tuple[tuple[Sampler, Spatial], ...]:
        """Sampler and transforms of each dataset, or one pair for all samples."""
        return tuple(zip(self.samplers, self.spatials, strict=True))

    @property
    def num_frames(self) -> int | None:
        """Frames of every clip; None if it depends on the video or its dataset."""
        return _common([clip_length(sampler) for sampler in self.samplers])

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None if it depends on the video, its dataset or its bucket."""
        return _common([spatial.crop.output for spatial in self.spatials])

    @property
    def sampler_text(self) -> str:
        """The samplers, for a loader's fingerprint."""
        return joined(self.samplers)


def _common(values: Sequence[_T]) -> _T | None:
    return values[0] if all(value == values[0] for value in values) else None


def joined(parts: Sequence[object]) -> str:
    """Return the text of what each dataset has, or the only one if they are equal."""
    texts = list(map(repr, parts))
    return texts[0] if len(set(texts)) == 1 else " + ".join(texts)


def clip_sizes(dataset: Dataset | Mixture, rules: ClipRules) -> ClipSizes:
    """Return the frames, heights and widths of the clips of all samples, computed from the annotations."""
    if isinstance(dataset, EveryFrame):
        raise UsageError("EveryFrame cannot be loaded in batches of varying shape", hint="give global_batch_size")
    parts = parts_of(dataset)
    pairs = rules.pairs if rules.ends else rules.pairs * len(parts)
    each = [_sizes(part, sampler, spatial) for part, (sampler, spatial) in zip(parts, pairs, strict=True)]
    return ClipSizes(*(np.concatenate(column) for column in zip(*each, strict=True)))


def _sizes(dataset: Dataset, sampler: Sampler, spatial: Spatial) -> tuple[IntArray, IntArray, IntArray]:
    heights = _fact(dataset, "height").astype(np.int64)
    if dataset.streams[0] == "flow":
        heights //= 2  # both halves of a flow picture, one above the other
    widths = _fact(dataset, "width").astype(np.int64)
    num_frames = _fact(dataset, "num_frames").astype(np.int64)
    frames = clip_lengths(sampler, num_frames, _fact(dataset, "fps").astype(np.float64))
    return frames, *spatial.sizes(heights, widths)


def varying_sizes(dataset: Dataset | Mixture, rules: ClipRules, *, required: bool) -> ClipSizes | None:
    """Return the sizes of the clips of all samples if they differ; None if all clips have one shape.

    None also if the sizes are not known beforehand; if they are `required`, that is an error.
    """
    for _, spatial in rules.pairs:
        if spatial.crop.output is None:
            spatial.output_of(256, 256)  # raises an error if the size must come from a bucket
    if rules.shape is not None:
        return None
    if len([name for name in rules.streams if name != FLOW]) > 1 or isinstance(dataset, EveryFrame):
        # Annotations have the size of the first camera only, and items have no annotations of their own.
        if required:
            told = "the sizes of all clips of several cameras, or of EveryFrame, are not known beforehand"
            raise UsageError(told, hint="use collate='stack' or 'list', or a crop with a size")
        return None
    known = all(
        (clip_length(sampler) is not None or hasattr(sampler, "count"))
        and (spatial.crop.output is not None or hasattr(spatial.crop, "sizes"))
        for sampler, spatial in rules.pairs
    )
    return clip_sizes(dataset, rules) if known or required else None


def _fact(dataset: Dataset, name: str) -> AnyArray:
    column: pa.ChunkedArray = dataset.column(name)
    if column.null_count:
        raise UsageError(
            f"{column.null_count} of {len(column)} samples have no {name!r} in the annotations, so the sizes of"
            " their clips are unknown",
            hint="remove these samples with `fastvid remove`, and add their sources again",
        )
    values: AnyArray = column.to_numpy()
    return values


class SampleAnnotations(Mapping[str, Any]):
    """The annotations of one sample, read column by column when they are used."""

    __slots__ = ("_dataset", "_sample")

    def __init__(self, dataset: Dataset | Mixture, sample: int) -> None:
        self._dataset, self._sample = dataset, sample

    def __getitem__(self, name: str) -> Any:
        dataset, sample = self._place()
        return dataset.annotations[name][int(dataset.rows[sample])].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._place()[0].annotations.column_names)

    def __len__(self) -> int:
        return len(self._place()[0].annotations.column_names)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _place(self) -> tuple[Dataset, int]:
        dataset = self._dataset
        if isinstance(dataset, EveryFrame):
            return dataset.samples, int(dataset.place(self._sample)[0])
        return part_of(dataset, self._sample)


def check_streams(streams: Sequence[str] | str | None, stack: int, present: Sequence[str]) -> tuple[str, ...]:
    """Return the stream names that a user requested; by default all but flow."""
    if streams is None:
        streams = [name for name in present if name != FLOW] or present[:1]
    check_kind("streams", streams, str, Sequence, use='"rgb", or a list of names')
    names = (streams,) if isinstance(streams, str) else tuple(streams)
    missing = [name for name in names if name not in present]
    if missing or not names or len(set(names)) != len(names):
        hint = "run `fastvid shard --streams rgb,flow` to make a dataset with optical flow" if FLOW in missing else None
        raise UsageError(f"streams are {names!r}, the dataset has {', '.join(present)}", hint=hint)
    check_least(1, flow_stack=stack)
    return names


def depth_of(dataset: Any, streams: Sequence[str]) -> dict[str, DepthScale]:
    """Return the streams that show depth, and how their levels become distances."""
    parts = [part.depth for part in getattr(dataset, "datasets", [dataset])]
    found = {stream: parts[0][stream] for stream in streams if stream in parts[0]}
    for part in parts[1:]:
        if {stream: part[stream] for stream in streams if stream in part} != found:
            told = f"datasets of a mixture store depth differently: {', '.join(found) or 'one of them has none'}"
            raise UsageError(told, hint="load them by themselves, or without the streams of depth")
    return found


def stack_frames(frames: IntArray, num_frames: int, stack: int) -> IntArray:
    """Return the flow indices of each frame of a clip, int64 [T * L], grouped by frame.

    Flow i is the motion from frame i to i + 1. Frame f has flows f - L // 2 to f - L // 2 + L - 1: for an even L as
    many before the frame as after it, for L = 1 the flow to the next frame. Beyond the ends of the video the first and
    the last flow are repeated.

    `frames`: int64 [T]. `num_frames`: frames of the video.
    """
    first = frames[:, None] - stack // 2 + np.arange(stack, dtype=np.int64)
    flows: IntArray = np.clip(first, 0, num_frames - 1).reshape(-1)
    return flows


def check_lengths(infos: Mapping[str, StreamInfo]) -> None:
    """Raise FormatError if the cameras of a sample differ in length or rate, or if its flow does not match."""
    if FLOW in infos:
        check_flow(infos[FLOW], infos.get(PICTURES))
    cameras = {name: info for name, info in infos.items() if name != FLOW}
    if len({(info.num_frames, info.fps) for info in cameras.values()}) > 1:
        found = ", ".join(f"{name} {info.num_frames} at {info.fps}/s" for name, info in cameras.items())
        hint = "open a loader of one of them, or index the dataset again"
        raise FormatError(f"the cameras of a sample have different numbers of frames or rates: {found}", hint=hint)


def check_flow(info: StreamInfo, picture: StreamInfo | None) -> None:
    """Raise FormatError unless a stream is optical flow and matches the picture stream."""
    if not info.flow_bound or info.height % 4:
        told = f"invalid flow stream: {info.width}x{info.height} pixels with bound {info.flow_bound}"
        raise FormatError(told, hint="rebuild the index with `fastvid index`")
    if picture is not None:
        wanted = (picture.width, 2 * picture.height, picture.num_frames)
        if (info.width, info.height, info.num_frames) != wanted:
            raise FormatError(
                f"flow has {info.width}x{info.height} pixels and {info.num_frames} frames, its picture needs"
                f" {wanted[0]}x{wanted[1]} and {wanted[2]}"
            )
