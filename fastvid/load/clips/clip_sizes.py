"""What a sampler and a crop make of every sample of a dataset, from its facts alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import FLOW
from fastvid.load.clips.augment import Spatial
from fastvid.load.clips.rules import ClipRules
from fastvid.load.clips.sampling import Sampler, clip_length, clip_lengths
from fastvid.load.order.every_frame import EveryFrame
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.load.order.sizes import ClipSizes
from fastvid.runtime.arrays import AnyArray, IntArray


def clip_sizes(dataset: Dataset | Mixture, rules: ClipRules) -> ClipSizes:
    """Return the frames, heights and widths of the clips of all samples, computed from the annotations.

    `dataset`: the samples.
    """
    if isinstance(dataset, EveryFrame):
        raise UsageError("batches of varying shape were asked for of EveryFrame", hint="give global_batch_size")
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


def varying_sizes(
    dataset: Dataset | Mixture, rules: ClipRules, streams: Sequence[str], *, required: bool
) -> ClipSizes | None:
    """Return the sizes of the clips of all samples if they differ; None if all clips have one shape.

    `dataset`: the samples.
    """
    for _, spatial in rules.pairs:
        if spatial.output is None:
            spatial.output_of(256, 256)  # fails if only a bucket has a size
    if rules.num_frames is not None and rules.output is not None:
        return None
    if len([name for name in streams if name != FLOW]) > 1 or isinstance(dataset, EveryFrame):
        # Of a sample with several cameras the annotations have the size of the first; items have no facts of their own.
        if required:
            raise UsageError(
                "the sizes of all clips of several cameras, or of EveryFrame, are not known beforehand",
                hint="use collate='stack' or 'list', or a crop with a size",
            )
        return None
    known = all(
        (clip_length(sampler) is not None or hasattr(sampler, "count"))
        and (spatial.output is not None or hasattr(spatial.crop, "sizes"))
        for sampler, spatial in rules.pairs
    )
    return clip_sizes(dataset, rules) if known or required else None


def _fact(dataset: Dataset, name: str) -> AnyArray:
    column: pa.ChunkedArray = dataset.column(name)
    if column.null_count:
        raise UsageError(
            f"{column.null_count} of {len(column)} samples have no {name!r} in the annotations, so the sizes of"
            " their clips are unknown",
            hint="leave them out: remove them by `fastvid remove`, and add their sources again",
        )
    values: AnyArray = column.to_numpy()
    return values
