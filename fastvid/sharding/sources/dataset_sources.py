"""Take the samples of datasets as sources of another job, with their annotations: keys, labels, captions, splits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import ANNOTATION_FIELDS, DATASET_JSON, FACT_FIELDS, FLOW, PICTURES, StreamFlag
from fastvid.format.shard import Shard
from fastvid.runtime.file_names import decode_name
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.storage import open_storage
from fastvid.storage.urls import is_remote


def is_dataset(root: str) -> bool:
    """Return whether a folder, local or in an object store, contains a dataset."""
    if is_remote(root):
        return root.startswith(("s3://", "gs://")) and open_storage(root).exists(DATASET_JSON)
    return os.path.isfile(os.path.join(root, DATASET_JSON))


def dataset_sources(roots: Sequence[str]) -> SourceList:
    """Return the samples of datasets as sources. Removed samples are left out; all classes are kept, in order.

    The columns of a source are its annotations, except facts of the old video; ``parent`` names the file that the
    sample was made from, so that samples of one file stay together. Its key is that of the sample.
    """
    sources: dict[str, Source] = {}
    classes: dict[str, None] = {}
    for root in roots:
        dataset = Dataset(root)
        if dataset.signals or not {PICTURES, FLOW}.issuperset(dataset.streams):
            raise UsageError(
                "a dataset with cameras or signals is not encoded again",
                file=root,
                hint="encode its source: `fastvid shard lerobot:ROOT --profile ...`",
            )
        labels = [label for label in dataset.labels.tolist() if label >= 0]
        names = dataset.classes or tuple(map(str, range(max(labels, default=-1) + 1)))
        classes |= dict.fromkeys(names)
        for source in _sources(dataset, names):
            if sources.setdefault(source.id, source) is not source:
                raise UsageError(
                    f"key {source.key!r} is in two of the datasets",
                    file=root,
                    hint="make one dataset of them with `fastvid merge --prefix` first",
                )
    return SourceList(tuple(sources[name] for name in sorted(sources)), tuple(classes), {})


def _sources(dataset: Dataset, names: Sequence[str]) -> list[Source]:
    found = []
    url = dataset.storage.url
    rows = dataset.annotations.take(dataset.rows).to_pylist()
    for row, index, at in zip(rows, *(part.tolist() for part in dataset.locate(range(len(rows)))), strict=True):
        shard = dataset.shard(index)
        label = None if row["label"] is None else names[row["label"]]
        if shard.root is not None:
            found.append(_in_place(row, label, shard, at))
            continue
        path = f"{url}/{shard.data}"
        member = shard.member(at)
        found.append(
            Source(
                decode_name(row["key"]),
                path if is_remote(url) else os.path.abspath(path),
                member[1],
                label,
                _columns(row),
                member=member,
                sound=shard.audio_member(at),
                key=row["key"],
            )
        )
    return found


def _in_place(row: dict[str, Any], label: str | None, shard: Shard, at: int) -> Source:
    """Return a sample of a dataset that lists its file."""
    bounds = row.get("asked_start_seconds"), row.get("asked_end_seconds")
    if shard.info(at).flags & StreamFlag.PART and bounds == (None, None):
        raise UsageError(
            "the annotations do not say which part of its file a sample is",
            key=row["key"],
            hint="encode its source instead of the dataset with `fastvid shard`",
        )
    assert shard.root is not None
    path, listed = shard.root.locate(shard.file(at).file), shard.file(at)
    columns = _columns(row)
    return Source(
        decode_name(row["key"]),
        path,
        listed.size,
        label,
        columns,
        *bounds,
        key=row["key"],
        tag=listed.tag if is_remote(path) else None,
        parent=None if bounds == (None, None) else columns["parent"],
    )


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name not in ANNOTATION_FIELDS | FACT_FIELDS}
    columns["parent"] = row.get("parent") or row["source_id"]
    return columns
