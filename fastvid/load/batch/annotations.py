"""What the annotations say about the rows of a batch: labels, texts, columns and the dataset of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.format.dataset import Dataset
from fastvid.load.batch.multi_hot import MultiHot, MultiHotLabels
from fastvid.load.batch.text import Text, TextColumns
from fastvid.load.order.batches import MASKED
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.random_draws import Draws
from fastvid.runtime.arrays import BoolArray, IntArray

IGNORED_LABEL: Final = -100
"""Label of masked and unlabelled rows: the default ignore_index of torch's cross_entropy."""


@dataclass(frozen=True, slots=True, eq=False)
class RowAnnotations:
    """The entries of batches that come from the annotations."""

    label: IntArray  # label of each sample of the dataset, int64 [N], -1 for none
    columns: Mapping[str, pa.ChunkedArray]
    text: TextColumns | None = None
    labels: MultiHotLabels | None = None
    mixture: Mixture | None = None

    @classmethod
    def of(
        cls,
        dataset: Dataset | Mixture,
        fields: Sequence[str],
        text: Text | None,
        labels: MultiHot | None,
    ) -> RowAnnotations:
        """Build from a loader's arguments."""
        return cls(
            dataset.labels,
            {name: dataset.column(name) for name in fields},
            None if text is None else TextColumns(text, dataset),
            None if labels is None else MultiHotLabels(labels, dataset),
            dataset if isinstance(dataset, Mixture) else None,
        )

    @property
    def fingerprint(self) -> dict[str, str]:
        """What determines texts and labels besides seed, epoch and position, as text by argument."""
        parts = {
            "text": None if self.text is None else self.text.text,
            "labels": None if self.labels is None else self.labels.labels,
        }
        return {name: repr(part) for name, part in parts.items() if part is not None}

    def on_device(self, samples: IntArray, valid: BoolArray) -> dict[str, npt.NDArray[Any]]:
        """Return the entries that belong on the device, larger items first.

        `samples`: sample of each row, int64 [B]; MASKED for padding. `valid`: which rows are not masked, bool
        [B].
        """
        label = np.where(valid, self.label[samples], -1)
        made: dict[str, npt.NDArray[Any]] = {"label": np.where(label < 0, IGNORED_LABEL, label)}
        return made if self.labels is None else made | {"labels": self.labels.rows(samples, valid)}

    def on_host(self, samples: IntArray, positions: IntArray, seed: int, epoch: int) -> dict[str, Any]:
        """Return the other entries.

        `samples`: sample of each row, int64 [B]; MASKED for padding. `positions`: position of each row, int64
        [B].
        """
        rows = [None if sample == MASKED else sample for sample in samples.tolist()]
        made: dict[str, Any] = {
            "fields": {
                name: tuple(None if row is None else column[row].as_py() for row in rows)
                for name, column in self.columns.items()
            }
        }
        if self.text is not None:
            drawn = [Draws(seed, epoch, position) for position in positions.tolist()]
            made["text"] = tuple(self.text.row(row, draws) for row, draws in zip(rows, drawn, strict=True))
        if self.mixture is not None:
            made["dataset"] = tuple("" if row is None else self.mixture.name_of(row) for row in rows)
        return made
