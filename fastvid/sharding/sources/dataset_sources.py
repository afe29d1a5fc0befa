"""Carry the annotations of a dataset along when its tars are sources of another job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastvid.format.dataset import Dataset
from fastvid.format.schema import ANNOTATION_FIELDS, DATASET_JSON, FACT_FIELDS
from fastvid.sharding.sources.tars import TarSample
from fastvid.storage import open_storage


@dataclass(frozen=True, slots=True)
class SourceDataset:
    """A dataset that is re-encoded.

    Attributes:
        classes: Its class names, ordered by label.
        tars: File names of its shards.
        rows: Annotations of its samples by key; removed samples are left out.
    """

    classes: tuple[str, ...]
    tars: frozenset[str]
    rows: dict[str, dict[str, Any]]

    def annotate(self, samples: Sequence[TarSample]) -> list[TarSample]:
        """Return the samples of one of its tars with their annotations instead of the facts in their JSON."""
        return [self._annotated(sample, self.rows[sample.name]) for sample in samples if sample.name in self.rows]

    def _annotated(self, sample: TarSample, row: dict[str, Any]) -> TarSample:
        columns = {name: value for name, value in row.items() if name not in ANNOTATION_FIELDS | FACT_FIELDS}
        # Samples of one video stay together, although each is now a source.
        columns["parent"] = row.get("parent") or row["source_id"]
        label = None if row["label"] is None else self.classes[row["label"]]
        return replace(sample, columns=columns, label=label, notes=())


def read_source_dataset(folder: str) -> SourceDataset | None:
    """Return the dataset in a local folder; None if there is none.

    Raises:
        FastvidError: If it is damaged.
    """
    storage = open_storage(folder)
    if not storage.exists(DATASET_JSON):
        return None
    dataset = Dataset(folder)
    tars = frozenset(f"{shard.name}.tar" for shard in dataset.generation.shards)
    rows = {row["key"]: row for row in dataset.annotations.to_pylist() if not row["removed"]}
    return SourceDataset(dataset.classes, tars, rows)
