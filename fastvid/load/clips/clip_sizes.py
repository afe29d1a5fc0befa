"""What a sampler and a crop make of every sample of a dataset, from its facts alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import FACT_FIELDS
from fastvid.load.clips.augment import Spatial
from fastvid.load.clips.sampling import Sampler, clip_lengths
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


def _fact(dataset: Dataset | Mixture, name: str) -> AnyArray:
    try:
        column: pa.ChunkedArray = dataset.column(name)
    except UsageError as error:
        if name not in FACT_FIELDS:
            raise
        raise UsageError(
            f"the annotations lack {name!r}: fastvid 0.1 made the dataset",
            hint="run `fastvid index DIR` to add the facts",
        ) from error
    values: AnyArray = column.to_numpy()
    return values
