"""The annotations of one sample, for samplers that choose frames by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastvid.format.dataset import Dataset
from fastvid.load.order.every_frame import EveryFrame
from fastvid.load.order.mixture import Mixture, part_of


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
