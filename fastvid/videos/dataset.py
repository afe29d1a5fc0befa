"""A dataset whose samples are videos: finding samples, facts about the dataset, and what a notebook shows of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FastvidError, SampleNotFoundError, UsageError
from fastvid.format.annotations import GenerationRows, open_annotations
from fastvid.format.dataset import Dataset
from fastvid.format.generations import history, read_annotations, read_generation, read_head
from fastvid.format.schema import FACT_FIELDS, PICTURES, read_facts
from fastvid.report.page import fragment, missing_tile, table, tile, tiles
from fastvid.runtime.arrays import BoolArray, IntArray, UInt8Array
from fastvid.runtime.near_names import near_names
from fastvid.runtime.values import check_integer, count, duration, path_text, shares, size, things
from fastvid.storage import Storage, open_storage
from fastvid.videos.pictures import Shown, contact_sheet, encode_picture, spread, tile_size
from fastvid.videos.video import Video


def find_samples(
    url: str,
    text: str | None = None,
    *,
    source: str | None = None,
    where: str | None = None,
    generation: int | None = None,
) -> list[dict[str, Any]]:
    """Find samples by key, source or condition; return one dict per sample in the order of the shards.

    Removed samples are found by key or source, but not by a condition.

    `text`: A key, or part of a key or source id. `source`: A source id, or the name of a file whose segments are
    samples. `where`: A condition in SQL. Exactly one of the three must be given.

    Each dict has the columns of the annotations that are not null, and:

    - ``key``, ``class``; ``shard``, and ``row`` in it;
    - ``member`` of the tar, with ``member_offset`` and ``member_size`` in bytes;
    - ``parent``: source id of the long video that contains the sample, and ``start_seconds`` in it;
    - ``removed_in``: number of the first generation without the sample that is still stored; None if not removed.
    """
    if (text is not None) + (source is not None) + (where is not None) != 1:
        raise UsageError("expected one of a key, a source and a condition", hint="give `KEY`, `--source` or `--where`")
    storage = open_storage(url)
    _, current = read_generation(storage, generation)
    if where is not None:
        dataset = Dataset(url, where=where, generation=current.number)
        table, rows = dataset.annotations, dataset.rows
    else:
        annotations = open_annotations(storage, current)
        table = annotations.table
        rows = _matching(annotations, text) if text is not None else _of_source(table, str(source))
    if not len(rows):
        names = table["key"] if text is not None else pc.drop_null(table["source_id"])
        near = ", ".join(map(repr, near_names(names, str(text if text is not None else source))))
        raise SampleNotFoundError(
            f"no sample has the key {text!r}" if text is not None else f"no sample has the source {source!r}",
            file=storage.url,
            hint=f"did you mean {near}?" if near else "list keys with `fastvid find DIR --where true`",
        )
    ends = np.cumsum([shard.samples for shard in current.shards])
    removed_in = _removed_in(storage, table, rows, current.number)
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    found = []
    for row in rows.tolist():
        index = int(np.searchsorted(ends, row, side="right"))
        shard = current.shards[index]
        values = {name: table[name][row].as_py() for name in table.column_names}
        if shard.name not in facts:
            facts[shard.name] = _facts(storage, shard.name, current.streams[0])
        label, key = values["label"], values["key"]
        named = label is not None and 0 <= label < len(current.classes)
        place = {"key": key, "shard": shard.name, "row": int(row - ends[index] + shard.samples)}
        place |= facts[shard.name].get(key, {}) | {"class": current.classes[label] if named else None}
        told, known = ({k: v for k, v in one.items() if v is not None} for one in (values, place))
        # A table may have a column with one of these names for something else.
        found.append(place | told | known | {"removed_in": removed_in.get(key)})
    return found


def _matching(annotations: GenerationRows, text: str) -> IntArray:
    exact, table = annotations.row(text), annotations.table
    if exact is not None:
        return np.array([exact], dtype=np.int64)
    return _rows(pc.or_kleene(*(pc.match_substring(table[name], text) for name in ("key", "source_id"))))


def _of_source(table: pa.Table, source: str) -> IntArray:
    """Return the rows of samples of a source; a segment's id is that of its file, then ``#`` and its seconds."""
    mask = pc.or_kleene(pc.equal(table["source_id"], source), pc.starts_with(table["source_id"], f"{source}#"))
    if "parent" in table.column_names:
        mask = pc.or_kleene(mask, pc.equal(table["parent"], source))
    return _rows(mask)


def _rows(mask: pa.ChunkedArray) -> IntArray:
    return np.flatnonzero(mask.fill_null(False).to_numpy()).astype(np.int64)


def _facts(storage: Storage, stem: str, stream: str) -> dict[str, dict[str, Any]]:
    wanted = ["member", "member_offset", "member_size", "parent", "start_seconds"]
    table = read_facts(storage, stem, ["key", "stream", *wanted])
    rows = table.filter(pc.equal(table["stream"], stream)).select(["key", *wanted]).to_pylist()
    return {row["key"]: {name: row[name] for name in wanted} for row in rows}


def _removed_in(storage: Storage, table: pa.Table, rows: IntArray, number: int) -> dict[str, int]:
    """Return for each removed key the oldest stored generation since which the sample has been hidden without break."""
    hidden = table.take(pa.array(rows)).filter(table["removed"].take(pa.array(rows)))["key"].to_pylist()
    found = dict.fromkeys(hidden, number)
    pending = set(hidden)
    for generation in history(storage, read_head(storage)) if pending else ():
        if generation.number >= number:
            continue
        older = read_annotations(storage, generation)
        pending &= set(older.filter(older["removed"])["key"].to_pylist())
        found |= dict.fromkeys(pending, generation.number)
        if not pending:
            break
    return found


_CLASSES: Final = 12  # rows of the table of classes
_SPLITS: Final = 6  # columns of the table of classes
_VALUES: Final = 3  # most common sizes and rates that are listed


def dataset_facts(dataset: Dataset) -> dict[str, str]:
    """Return facts about the selected samples by name, as text: numbers, sizes, rates and the selection."""
    shards = dataset.generation.shards
    facts = {"samples": count(len(dataset)), "frames": count(int(dataset.num_frames.sum()))}
    facts |= {"classes": count(len(dataset.classes))} if dataset.classes else {}
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
    """Return an HTML table of the largest classes by split; empty if the samples have neither classes nor splits."""
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


_SAMPLES: Final = 8  # samples that a notebook shows
_LOOKED_AT: Final = 10_000  # they are chosen from the first so many samples


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
        self._numbers([number])  # raises an error if there is no such sample
        shards, rows = self.locate([number])
        label = int(self.labels[number])
        return Video.of(
            self.shard(int(shards[0])),
            int(rows[0]),
            (self.annotations, int(self.rows[number])),
            label=label,
            class_name=self.classes[label] if 0 <= label < len(self.classes) else None,
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
        # Pictures of different sizes are not resized but padded with white.
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
        """Return a few samples to show, all from one shard: opening a shard of an object store may read megabytes."""
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
        root: Folder or URL below which the videos of a dataset in place are now, if they were moved since they were
            indexed; it replaces the folder below which all of them were.

    Raises:
        StorageError: If there is no dataset.
        VersionError: If its major version is newer.
        UsageError: If the split or the condition is wrong, or no sample matches.
    """
    folder = None if root is None else os.fspath(root)
    return VideoDataset(path_text("path", path), split=split, where=where, generation=generation, root=folder)
