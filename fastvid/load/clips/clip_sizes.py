"""What a sampler and a crop make of every sample of a dataset, from its facts alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.augment import Spatial
from fastvid.load.clips.sampling import Sampler, clip_length, clip_lengths
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.sizes import ClipSizes
from fastvid.runtime.arrays import AnyArray


def clip_sizes(dataset: Dataset | Mixture, sampler: Sampler, spatial: Spatial) -> ClipSizes:
    """Return the frames, heights and widths of the clips of all samples, computed from the annotations.

    Args:
        dataset: The samples.
        sampler: The frame sampler. If it has no fixed length, it needs ``count(num_frames, fps)``.
        spatial: Crop and flip. If the crop takes its size from a bucket, the sides are those of the videos.

    Raises:
        UsageError: If the dataset's annotations lack the facts, or the sampler cannot tell how many frames it makes.
    """
    heights = _fact(dataset, "height").astype(np.int64)
    if dataset.streams[0] == "flow":
        heights //= 2  # both halves of a flow picture, one above the other
    widths = _fact(dataset, "width").astype(np.int64)
    num_frames = _fact(dataset, "num_frames").astype(np.int64)
    frames = clip_lengths(sampler, num_frames, _fact(dataset, "fps").astype(np.float64))
    return ClipSizes(frames, *spatial.sizes(heights, widths))


def varying_sizes(
    dataset: Dataset | Mixture, sampler: Sampler, spatial: Spatial, *, required: bool
) -> ClipSizes | None:
    """Return the sizes of the clips of all samples if they differ; None if all clips have one shape.

    Args:
        dataset: The samples.
        sampler: The frame sampler.
        spatial: Crop and flip.
        required: Whether a sampler or crop that cannot tell its sizes is an error, otherwise None.

    Raises:
        UsageError: If the crop takes its size from a bucket; or see `clip_sizes`.
    """
    if spatial.output is None:
        spatial.output_of(256, 256)  # fails if only a bucket has a size
    elif clip_length(sampler) is not None:
        return None
    known = clip_length(sampler) is not None or hasattr(sampler, "count")
    known &= spatial.output is not None or hasattr(spatial.crop, "sizes")
    return clip_sizes(dataset, sampler, spatial) if known or required else None


def _fact(dataset: Dataset | Mixture, name: str) -> AnyArray:
    column: pa.ChunkedArray = dataset.column(name)
    if column.null_count:
        raise UsageError(
            f"{column.null_count} of {len(column)} samples have no {name!r} in the annotations, so the sizes of"
            " their clips are unknown",
            hint="leave them out: remove them by `fastvid remove`, and add their sources again",
        )
    values: AnyArray = column.to_numpy()
    return values
