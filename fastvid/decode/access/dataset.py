"""A dataset whose samples are videos: selection, and what a notebook shows of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, overload

import numpy as np

from fastvid.decode.access.indices import spread
from fastvid.decode.access.pictures import contact_sheet, encode_picture, tile_size
from fastvid.decode.access.shown import Shown
from fastvid.decode.access.summary import class_table, dataset_facts
from fastvid.decode.access.video import Video
from fastvid.errors import FastvidError, SampleNotFoundError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import PICTURES
from fastvid.report.fragment import fragment, missing_tile, tile, tiles
from fastvid.runtime.arrays import BoolArray, IntArray, UInt8Array
from fastvid.runtime.checks import check_integer
from fastvid.runtime.units import duration

_SAMPLES: Final = 8  # samples that a notebook shows of a dataset
_LOOKED_AT: Final = 10_000  # first samples among which they are chosen


class VideoDataset(Dataset, Shown):
    """A `Dataset` whose samples are videos: ``dataset["key"]``, ``dataset[7]``, ``for video in dataset``.

    ``dataset[10:20]``, ``dataset[[5, 1, 8]]``, ``dataset[["key", "other"]]`` and ``dataset[mask]`` are datasets of
    these samples, see `Dataset.select`.
    """

    _NAME: ClassVar[str] = "dataset"

    @overload
    def __getitem__(self, sample: str | int) -> Video: ...

    @overload
    def __getitem__(self, sample: slice | Sequence[int] | list[str] | IntArray | BoolArray) -> VideoDataset: ...

    def __getitem__(
        self, sample: str | int | slice | Sequence[int] | list[str] | IntArray | BoolArray
    ) -> Video | VideoDataset:
        """Return a sample by its key or number, or a dataset of several.

        Raises:
            SampleNotFoundError: If the selection has no such sample; also a KeyError and an IndexError.
            UsageError: If several samples are not given by distinct keys or numbers, or by a mask.
        """
        if isinstance(sample, slice) or np.ndim(sample):
            return self.select(sample)  # type: ignore[arg-type]
        number = self.find(sample) if isinstance(sample, str) else check_integer("sample", sample)
        if not 0 <= number < len(self):
            raise SampleNotFoundError(
                f"sample {number} is outside the selection of {len(self)}",
                file=self.storage.url,
                hint=f"give a number from 0 to {len(self) - 1}",
            )
        shards, rows = self.locate([number])
        label = int(self.labels[number])
        return Video(
            self.shard(int(shards[0])),
            int(rows[0]),
            key=self.key(number),
            label=label,
            class_name=self.classes[label] if 0 <= label < len(self.classes) else None,
            annotations=(self.annotations, int(self.rows[number])),
            stream=PICTURES if PICTURES in self.streams else self.streams[0],
        )

    def __iter__(self) -> Iterator[Video]:
        return (self[number] for number in range(len(self)))

    def _repr_html_(self) -> str:
        listed = tiles(self._tile(number) for number in self._shown())
        return fragment(self.storage.url, dataset_facts(self), listed + class_table(self))

    def _picture(self) -> UInt8Array:
        frames = [self[number]._middle()[0] for number in self._shown()]
        height, width = (max(one.shape[side] for one in frames) for side in (0, 1))
        # Pictures of different sizes keep their own, on white.
        padded = [
            np.pad(one, ((0, height - one.shape[0]), (0, width - one.shape[1]), (0, 0)), constant_values=255)
            for one in frames
        ]
        return contact_sheet(np.stack(padded))

    def _tile(self, number: int) -> str:
        key, label = self.key(number), int(self.labels[number])
        lines = [self.classes[label]] if 0 <= label < len(self.classes) else []
        try:
            video = self[number]
            height, width = tile_size(video.height, video.width)
            picture = encode_picture(video._middle((height, width))[0])
        except FastvidError as error:
            return missing_tile(error.message, key, *lines)
        return tile(picture, width, key, *lines, duration(float(video.duration)))

    def _shown(self) -> list[int]:
        """Return a few samples to show, all of one shard: opening one of an object store may read megabytes."""
        shards, _ = self.locate(np.arange(min(len(self), _LOOKED_AT)))
        first = np.flatnonzero(shards == shards[0])
        shown: list[int] = first[spread(len(first), _SAMPLES)].tolist()
        return shown


def open(  # noqa: A001 - users type fastvid.open
    path: str | os.PathLike[str],
    split: str | None = None,
    where: str | None = None,
    generation: int | str | None = None,
    root: str | os.PathLike[str] | None = None,
) -> VideoDataset:
    """Open a dataset.

    Args:
        path: Folder or URL of the dataset.
        split: Value of the column ``split``, or ``column:value`` for another split column; all samples by default.
        where: Condition in DuckDB's SQL over the annotations' columns and ``class``, for example
            ``"duration > 2 and class = 'archery'"``.
        generation: Number or tag of the generation; the current one by default.
        root: Folder or URL that contains the videos of a dataset that lists them in place, if they were moved since
            they were indexed; it replaces the folder that all of them were below.

    Raises:
        StorageError: If there is no dataset.
        VersionError: If its major version is newer.
        UsageError: If the split or the condition is wrong, or no sample matches.
    """
    folder = None if root is None else os.fspath(root)
    return VideoDataset(os.fspath(path), split=split, where=where, generation=generation, root=folder)
