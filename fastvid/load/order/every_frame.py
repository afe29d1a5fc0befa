"""Every frame of a dataset as an item of its own, as policies are trained on episodes."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.arrays import IntArray


class EveryFrame(Dataset):
    """The frames of a dataset's samples, numbered through the samples: item i is frame f of sample s.

    A `ClipLoader` of it visits every frame once an epoch, in an order that is computed, not stored: of each item a clip
    of the frames around it, see `fastvid.Deltas`. Keys, labels and columns are those of the sample.

        items = fastvid.EveryFrame(fastvid.open("shards/pusht"))
        loader = fastvid.ClipLoader(items, frames=fastvid.Deltas([-0.1, 0.0]), ...)

    Args:
        dataset: The samples; to choose among them, use its `select`, or `where=` of `fastvid.open`.

    Raises:
        UsageError: If it is a mixture.

    Attributes:
        samples: The samples.
    """

    def __init__(self, dataset: Dataset) -> None:
        if isinstance(dataset, Mixture) or not isinstance(dataset, Dataset):
            raise UsageError(
                f"EveryFrame was given a {type(dataset).__name__}", hint="give it one dataset, of `fastvid.open`"
            )
        self.samples = dataset
        self._stops: IntArray = np.cumsum(dataset.num_frames, dtype=np.int64)
        self.storage, self.root, self.dataset_id = dataset.storage, dataset.root, dataset.dataset_id
        self.generation, self.split, self.where = dataset.generation, dataset.split, dataset.where
        self.selection = f"{dataset.selection} every frame".strip()
        self._shards, self._annotations, self._ends = dataset._shards, dataset._annotations, dataset._ends

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __reduce__(self) -> tuple[object, ...]:
        return EveryFrame, (self.samples,)

    def place(self, items: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return the sample and the frame of items, both int64 [N]."""
        wanted = np.asarray(items, dtype=np.int64)
        samples = np.searchsorted(self._stops, wanted, side="right")
        return samples, wanted - np.where(samples > 0, self._stops[samples - 1], 0)

    def locate(self, samples: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return the shard index and the row inside the shard of the items' samples, both int64 [N]."""
        return self.samples.locate(self.place(samples)[0])

    def key(self, sample: int) -> str:
        """Return the key of an item's sample."""
        return self.samples.key(int(self.place(sample)[0]))

    def keys_of(self, samples: IntArray) -> list[str]:
        """Return the keys of the samples of items, given by their numbers, int64 [N]."""
        return self.samples.keys_of(self.place(samples)[0])

    def column(self, name: str) -> Any:
        """Return a column, in which each value stands for all frames of its sample.

        Raises:
            UsageError: If there is no such column.
        """
        values = self.samples.column(name)
        whole = values.combine_chunks()
        stops = pa.array(self._stops)
        kind = pa.run_end_encoded(stops.type, whole.type)
        # `from_arrays` fails in pyarrow 16.
        return pa.RunEndEncodedArray.from_buffers(kind, len(self), [None], children=[stops, whole])

    @property
    def labels(self) -> Any:
        """Label of each item's sample, indexed like an array; -1 for a sample without a label."""
        return self.repeat(self.samples.labels)

    @property
    def num_frames(self) -> Any:
        """Frames of each item's sample, indexed like an array."""
        return self.repeat(self.samples.num_frames)

    def repeat(self, values: npt.NDArray[Any]) -> Any:
        """Return a value of each sample as one of each item, indexed like an array."""
        return _OfSamples(self, values)

    @property
    def shard_sizes(self) -> IntArray:
        """Number of items in each shard, int64 [S]."""
        counts = np.concatenate([[0], self._stops])
        return np.diff(counts[np.cumsum(self.samples.shard_sizes)], prepend=0)

    def select(self, samples: object) -> NoReturn:  # noqa: ARG002
        """Raise UsageError: samples are selected before their frames are items."""
        raise UsageError(
            "the frames of EveryFrame cannot be selected", hint="write EveryFrame(dataset.select(...)), or use where="
        )


class _OfSamples:
    """Values of samples, indexed by items."""

    def __init__(self, items: EveryFrame, values: npt.NDArray[Any]) -> None:
        self._items, self._values = items, values

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, items: npt.ArrayLike) -> Any:
        return self._values[self._items.place(items)[0]]
