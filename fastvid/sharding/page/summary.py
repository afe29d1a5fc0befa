"""Summarises a dataset from its tables, without opening a video: counts, distributions and the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError
from fastvid.format.generations import Generation, history, read_annotations, read_generation, read_head
from fastvid.format.parquet import from_parquet
from fastvid.format.schema import LEDGER
from fastvid.runtime.arrays import FloatArray, IntArray
from fastvid.sharding.job.ledger import read_ledger
from fastvid.storage import Storage, open_storage

UNLABELLED: Final = "(no label)"

_FACTS: Final = (
    "key", "source_id", "stream", "num_frames", "fps_num", "fps_den", "width", "height", "codec", "color_range",
    "color_matrix", "conforms", "whole", "member_size", "num_packets", "num_keys", "num_droppable",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClassCount:
    """Number of samples of a class.

    Attributes:
        name: The class; UNLABELLED for samples without a label.
        count: Number of samples.
        splits: Number of samples by value of the first split column; empty if there is none.
    """

    name: str
    count: int
    splits: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of a generation. Arrays have one entry per visible sample, in the order of the shards.

    Attributes:
        url: The dataset's folder.
        dataset_id: The dataset's id.
        generation: The generation.
        history: Number and note of the existing generations, newest first.
        annotations: Rows of the visible samples.
        rows: Row of each visible sample among all rows of the generation, int64 [N].
        facts: Facts of the visible samples' first stream, in the same order.
        removed: Number of hidden samples.
        ledger: The job's ledger; None if there is none.
    """

    url: str
    dataset_id: str
    generation: Generation
    history: tuple[tuple[int, str], ...]
    annotations: pa.Table
    rows: IntArray
    facts: pa.Table
    removed: int
    ledger: pa.Table | None

    @property
    def num_samples(self) -> int:
        """Number of visible samples."""
        return len(self.rows)

    @property
    def tar_bytes(self) -> int:
        """Total size of the tars in bytes."""
        return sum(shard.bytes for shard in self.generation.shards)

    @cached_property
    def num_frames(self) -> IntArray:
        """Number of frames of each sample."""
        return self._fact("num_frames").astype(np.int64)

    @cached_property
    def seconds(self) -> FloatArray:
        """Duration of each sample in seconds."""
        rate = self._fact("fps_num") / np.maximum(self._fact("fps_den"), 1)
        return np.asarray(self.num_frames / np.maximum(rate, 1e-9), dtype=np.float64)

    @cached_property
    def bytes(self) -> IntArray:
        """Size of each sample's first video stream in bytes."""
        return self._fact("member_size").astype(np.int64)

    @cached_property
    def sizes(self) -> Counter[str]:
        """Number of samples by width and height, for example ``336x256``."""
        return Counter(f"{w}x{h}" for w, h in zip(*self._lists("width", "height"), strict=True))

    @cached_property
    def rates(self) -> Counter[str]:
        """Number of samples by frame rate."""
        return Counter(f"{a / b:.4g}" for a, b in zip(*self._lists("fps_num", "fps_den"), strict=True) if b)

    @cached_property
    def codecs(self) -> Counter[str]:
        """Number of samples by codec."""
        return Counter(self.facts["codec"].to_pylist())

    @cached_property
    def colours(self) -> Counter[str]:
        """Number of samples by colour range and matrix."""
        return Counter(f"{r} {m}" for r, m in zip(*self._lists("color_range", "color_matrix"), strict=True))

    @cached_property
    def packets_per_key(self) -> float:
        """Packets per key packet, over the whole dataset."""
        keys = int(self._fact("num_keys").sum())
        return int(self._fact("num_packets").sum()) / keys if keys else 0.0

    @cached_property
    def droppable_share(self) -> float:
        """Fraction of the packets that no other packet refers to."""
        packets = int(self._fact("num_packets").sum())
        return int(self._fact("num_droppable").sum()) / packets if packets else 0.0

    @cached_property
    def conforming(self) -> int:
        """Number of samples that keep the promises of profiles, because a profile wrote them."""
        return int(np.count_nonzero(self._fact("conforms")))

    @cached_property
    def whole(self) -> int:
        """Number of samples that must be decoded from their first packet."""
        return int(np.count_nonzero(self._fact("whole")))

    @cached_property
    def profiles(self) -> Counter[str]:
        """Number of shards by profile."""
        return Counter(str(shard.profile.get("name", "unknown")) for shard in self.generation.shards)

    @cached_property
    def split_columns(self) -> Mapping[str, Counter[str]]:
        """For each split column, the number of samples by value; samples without a value count as ``-``."""
        names = [name for name in self.annotations.column_names if name.startswith("split")]
        counts = {name: Counter(map(_named, self.annotations[name].to_pylist())) for name in names}
        return {name: count for name, count in counts.items() if set(count) != {"-"}}

    @cached_property
    def class_counts(self) -> tuple[ClassCount, ...]:
        """Every class, including empty ones, most samples first."""
        counts = Counter(self.class_names)
        first = next(iter(self.split_columns), None)
        pairs: Counter[tuple[str, str]] = Counter()
        if first is not None:
            pairs.update(zip(self.class_names, map(_named, self.annotations[first].to_pylist()), strict=True))
        values = sorted(self.split_columns[first], key=lambda v: -self.split_columns[first][v]) if first else []
        found = [*self.generation.classes, *(name for name in counts if name not in set(self.generation.classes))]
        classes = [
            ClassCount(name, counts[name], {value: pairs[name, value] for value in values if pairs[name, value]})
            for name in dict.fromkeys(found)
        ]
        return tuple(sorted(classes, key=lambda c: (c.name == UNLABELLED, -c.count, c.name)))

    @cached_property
    def class_names(self) -> Sequence[str]:
        """Class name of each sample."""
        classes = self.generation.classes
        return [
            UNLABELLED if label is None else classes[label] if 0 <= label < len(classes) else str(label)
            for label in self.annotations["label"].to_pylist()
        ]

    @cached_property
    def rejected(self) -> Counter[str]:
        """Number of rejected sources, by reason."""
        reasons = [] if self.ledger is None else self.ledger["reason"].to_pylist()
        return Counter(reason for reason in reasons if reason is not None)

    @property
    def sources(self) -> int:
        """Number of sources in the ledger."""
        return 0 if self.ledger is None else int(self.ledger.num_rows)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "dataset": self.url,
            "dataset_id": self.dataset_id,
            "generation": self.generation.number,
            "generations": [{"number": number, "note": note} for number, note in self.history],
            "samples": self.num_samples,
            "removed": self.removed,
            "shards": len(self.generation.shards),
            "tar_bytes": self.tar_bytes,
            "frames": int(self.num_frames.sum()),
            "seconds": float(self.seconds.sum()),
            "video_bytes": int(self.bytes.sum()),
            "streams": list(self.generation.streams),
            "profiles": dict(self.profiles),
            "classes": {c.name: c.count for c in self.class_counts},
            "splits": {name: dict(counts) for name, counts in self.split_columns.items()},
            "sizes": dict(self.sizes),
            "rates": dict(self.rates),
            "codecs": dict(self.codecs),
            "colours": dict(self.colours),
            "conforming": self.conforming,
            "whole": self.whole,
            "packets_per_key": self.packets_per_key,
            "droppable_share": self.droppable_share,
            "sources": self.sources,
            "rejected": dict(self.rejected),
        }

    def _fact(self, name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.facts[name].to_numpy()
        return values

    def _lists(self, *names: str) -> list[list[Any]]:
        return [self.facts[name].to_pylist() for name in names]


def summarize(url: str, *, generation: int | None = None) -> Summary:
    """Summarise a dataset from its tables.

    Args:
        url: The dataset's folder.
        generation: Number of the generation; the current one by default.

    Raises:
        StorageError: If there is no dataset or generation, or a table is missing.
        FormatError: If a table is broken, or tables contradict each other.
    """
    storage = open_storage(url)
    dataset_id, record = read_generation(storage, generation)
    annotations = read_annotations(storage, record)
    facts = _read_facts(storage, record)
    if facts.num_rows != annotations.num_rows:
        raise FormatError(
            f"{facts.num_rows} facts for {annotations.num_rows} annotations",
            file=storage.url,
            hint="run `fastvid verify` to see which is wrong; with --repair it rebuilds facts",
        )
    hidden = annotations["removed"].to_numpy()
    rows = np.flatnonzero(~hidden)
    return Summary(
        url=storage.url,
        dataset_id=dataset_id,
        generation=record,
        history=tuple((g.number, g.note) for g in history(storage, read_head(storage))),
        annotations=annotations.take(pa.array(rows)),
        rows=rows,
        facts=facts.take(pa.array(rows)),
        removed=int(np.count_nonzero(hidden)),
        ledger=read_ledger(storage)[0] if storage.exists(LEDGER) else None,
    )


def _read_facts(storage: Storage, generation: Generation) -> pa.Table:
    """Return the facts of every sample's first stream, in the order of the shards."""
    tables = []
    for shard in generation.shards:
        name = f"{shard.name}.parquet"
        table = from_parquet(storage.read(name), file=name, columns=list(_FACTS))
        tables.append(table.filter(pc.equal(table["stream"], generation.streams[0])))
    if not tables:
        return pa.table({name: [] for name in _FACTS})
    return pa.concat_tables(tables)


def _named(value: Any) -> str:
    return "-" if value is None else str(value)
