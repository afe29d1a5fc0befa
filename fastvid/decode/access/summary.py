"""Summarise a dataset for a notebook, from its annotations alone."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.format.dataset import Dataset
from fastvid.format.schema import FACT_FIELDS
from fastvid.report.markup import table
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.units import count, duration, shares, size, things

_CLASSES: Final = 12  # rows of the table
_SPLITS: Final = 6  # columns of the table
_VALUES: Final = 3  # most common sizes and rates


def dataset_facts(dataset: Dataset) -> dict[str, str]:
    """Return what is known of the selected samples, by name."""
    shards = dataset.generation.shards
    facts = {
        "samples": count(len(dataset)),
        "classes": count(len(dataset.classes)),
        "frames": count(int(dataset.num_frames.sum())),
    }
    # Datasets of other tools may lack these facts.
    known = {name: dataset.column(name).drop_null() for name in FACT_FIELDS if name in dataset.annotations.column_names}
    if len(known.get("duration", ())):
        facts["duration"] = duration(float(pc.sum(known["duration"]).as_py()))
    if len(known.get("width", ())):
        width, height = (known[name].to_numpy().astype(np.int64) for name in ("width", "height"))
        found = zip(*np.unique(width << 32 | height, return_counts=True), strict=True)
        sizes = {f"{one >> 32}x{one & 0xFFFFFFFF}": int(number) for one, number in found}
        facts["size"] = shares(Counter(sizes), _VALUES)
    if len(known.get("fps", ())):
        rates = Counter[str]()
        for one in pc.value_counts(known["fps"]).to_pylist():
            rates[f"{one['values']:.6g} fps"] += one["counts"]
        facts["rate"] = shares(rates, _VALUES)
    facts["streams"] = ", ".join(dataset.streams)
    if len(dataset) == dataset.generation.num_samples:
        facts["stored"] = f"{size(sum(shard.bytes for shard in shards))} in {things(len(shards), 'shard')}"
    else:
        facts["selected of"] = f"{things(dataset.generation.num_samples, 'sample')}"
    facts["generation"] = str(dataset.generation.number)
    chosen = {"split": dataset.split, "where": dataset.where}
    return facts | {name: value for name, value in chosen.items() if value is not None}


def class_table(dataset: Dataset) -> str:
    """Return a table of the largest classes by split as markup, empty if the samples have neither."""
    schema = dataset.annotations.schema
    splits = [field.name for field in schema if field.name.startswith("split") and pa.types.is_string(field.type)]
    if not dataset.classes and not splits:
        return ""
    names = (*dataset.classes, "no class")
    labels = np.where(
        (dataset.labels >= 0) & (dataset.labels < len(dataset.classes)), dataset.labels, len(dataset.classes)
    )
    columns: dict[str, IntArray] = {}
    for split in splits:
        encoded = dataset.column(split).combine_chunks().dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        for code, value in enumerate(encoded.dictionary.to_pylist()):
            columns[value if split == "split" else f"{split} {value}"] = np.bincount(
                labels[codes == code], minlength=len(names)
            )
    shown = list(columns)[:_SPLITS]
    total = np.bincount(labels, minlength=len(names))
    order = [number for number in np.argsort(-total, kind="stable").tolist() if total[number]]
    rows = [(names[n], count(int(total[n])), *(count(int(columns[s][n])) for s in shown)) for n in order[:_CLASSES]]
    if rest := order[_CLASSES:]:
        sums = [total[rest].sum(), *(columns[s][rest].sum() for s in shown)]
        rows.append((f"and {count(len(rest))} more", *(count(int(number)) for number in sums)))
    return table(("class", "samples", *shown), rows, numeric=[False, *[True] * (1 + len(shown))])
