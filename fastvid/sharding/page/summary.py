"""Summarises a dataset from its tables, without opening a video: counts, hours, columns, encoding and the ledger."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError
from fastvid.format.bitstream import has_arithmetic_coding
from fastvid.format.generations import Generation, history, read_annotations, read_generation, read_head
from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS, LEDGER, SIGNALS, Codec, from_parquet
from fastvid.runtime.arrays import BoolArray, FloatArray, IntArray
from fastvid.runtime.values import count, duration, percent, shares, size, things, words
from fastvid.sharding.job.ledger import read_ledger
from fastvid.storage import Storage, open_storage

# Maximum number of shards whose facts are read. Each shard has a file of facts, and a large dataset has 10,000 shards;
# these are enough to know how its samples are encoded.
_MOST_SHARDS: Final = 64
_READERS: Final = 16

_COLUMNS: Final = (
    "stream", "num_frames", "fps_num", "fps_den", "codec", "color_range", "color_matrix", "conforms", "whole",
    "member_size", "num_packets", "num_keys", "num_droppable", "extradata",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncodingSummary:
    """Statistics of the first stream of the visible samples of some shards."""

    of: int  # number of shards of the generation
    shards_read: int  # number of shards whose facts were read
    samples: int
    bytes: int
    bit_rate: float  # bits per second
    codecs: Counter[str]  # samples by codec
    colours: Counter[str]  # samples by colour range and matrix
    conforming: int  # number of samples that a profile wrote, with the properties that profiles promise
    whole: int  # number of samples that must be decoded from their first packet
    packets_per_key: float
    droppable_share: float  # fraction of the packets that no other packet refers to
    arithmetic: int  # number of samples in H.264 with arithmetic coding (CABAC)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "of"}


def read_encoding(storage: Storage, generation: Generation, visible: BoolArray) -> EncodingSummary:
    """Read the facts of at most 64 shards, evenly spread.

    `visible`: which of the generation's samples are not removed, bool [N].
    """
    total = len(generation.shards)
    chosen = np.unique(np.linspace(0, total - 1, min(total, _MOST_SHARDS)).round().astype(np.int64)).tolist()
    ends = np.cumsum([shard.samples for shard in generation.shards])

    def read(index: int) -> pa.Table:
        shard = generation.shards[index]
        name = f"{shard.name}.parquet"
        table = from_parquet(storage.read(name), file=name, columns=list(_COLUMNS))
        table = table.filter(pc.equal(table["stream"], generation.streams[0]))
        if table.num_rows != shard.samples:
            raise FormatError(
                f"{table.num_rows} facts for {shard.samples} samples",
                file=name,
                hint="run `fastvid verify DIR --repair`, which rebuilds the facts of the dataset in DIR",
            )
        return table.filter(pa.array(visible[ends[index] - shard.samples : ends[index]]))

    with ThreadPoolExecutor(_READERS) as pool:
        tables = list(pool.map(read, chosen))
    facts = pa.concat_tables(tables) if tables else pa.table({name: [] for name in _COLUMNS})
    column: dict[str, npt.NDArray[Any]] = {name: facts[name].to_numpy() for name in facts.column_names}
    seconds = (column["num_frames"] * column["fps_den"] / np.maximum(column["fps_num"], 1)).sum()
    totals = (int(column[name].sum()) for name in ("member_size", "num_packets", "num_keys", "num_droppable"))
    size, packets, keys, droppable = totals
    colours = zip(facts["color_range"].to_pylist(), facts["color_matrix"].to_pylist(), strict=True)
    return EncodingSummary(
        of=total,
        shards_read=len(chosen),
        samples=facts.num_rows,
        bytes=size,
        bit_rate=float(8 * size / max(seconds, 1e-9)),
        codecs=Counter(facts["codec"].to_pylist()),
        colours=Counter(f"{levels} {matrix}" for levels, matrix in colours),
        conforming=int(np.count_nonzero(column["conforms"])),
        whole=int(np.count_nonzero(column["whole"])),
        packets_per_key=packets / keys if keys else 0.0,
        droppable_share=droppable / packets if packets else 0.0,
        arithmetic=sum(map(_is_arithmetic, facts["codec"].to_pylist(), facts["extradata"].to_pylist())),
    )


@lru_cache(maxsize=256)  # datasets have few headers
def _is_arithmetic(codec: str, extradata: bytes) -> bool:
    """Return whether a stream is H.264 with arithmetic coding."""
    return codec == Codec.H264.label and has_arithmetic_coding(extradata)


UNLABELLED: Final = "(no label)"

NO_VALUE: Final = "-"

_SPLIT: Final = "split"
_LOOKED_AT: Final = 100  # number of rows that are searched for examples of a column's values
_EXAMPLES: Final = 3
_TOLD: Final = ("number", "time", "note", "reason")  # fields of each generation in the summary
# Columns that say where a sample was cut from its source.
_OURS: Final = frozenset(
    {"parent", "start_seconds", "end_seconds", "bad_frames", "asked_start_seconds", "asked_end_seconds"}
)


class Total(NamedTuple):
    """Number and duration in seconds of samples with something in common."""

    samples: int
    seconds: float


Totals = Mapping[Any, Total]
"""Totals by a value that samples have in common, most samples first."""


@dataclass(frozen=True, slots=True)
class ClassCount:
    """What a class contains."""

    name: str  # the class; UNLABELLED for samples without a label
    count: int  # number of samples
    seconds: float
    splits: Totals  # by value of the first split column; empty if there is none

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        splits = {value: total.samples for value, total in self.splits.items()}
        return {"samples": self.count, "seconds": self.seconds, "splits": splits}


@dataclass(frozen=True, slots=True)
class Column:
    """An annotation column that came with the sources, such as a caption, with some of its values."""

    name: str
    kind: str
    missing: int  # number of samples without a value
    examples: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of a generation. Arrays have one entry per visible sample, in the order of the shards."""

    url: str
    dataset_id: str
    generation: Generation
    history: tuple[Generation, ...]
    annotations: pa.Table  # rows of the visible samples
    encoding: EncodingSummary  # how samples are encoded, from the facts of some shards
    removed: int  # number of hidden samples
    ledger: pa.Table | None

    @property
    def num_samples(self) -> int:
        """Number of visible samples."""
        return int(self.annotations.num_rows)

    @property
    def tar_bytes(self) -> int:
        """Total size of the tars in bytes."""
        return sum(shard.bytes for shard in self.generation.shards if not shard.is_in_place)

    @property
    def in_place(self) -> int:
        """Number of samples, visible and hidden, whose videos are not in tars."""
        return sum(shard.samples for shard in self.generation.shards if shard.is_in_place)

    @cached_property
    def num_frames(self) -> IntArray:
        """Number of frames of each sample."""
        return np.asarray(self.annotations["num_frames"].to_numpy(), dtype=np.int64)

    @cached_property
    def seconds(self) -> FloatArray:
        """Duration of each sample in seconds."""
        return np.asarray(self.annotations["duration"].to_numpy(), dtype=np.float64)

    @cached_property
    def sizes(self) -> Counter[str]:
        """Number of samples by width and height, for example ``336x256``."""
        sides = (self.annotations[name].to_pylist() for name in ("width", "height"))
        return Counter(f"{width}x{height}" for width, height in zip(*sides, strict=True))

    @cached_property
    def rates(self) -> Counter[str]:
        """Number of samples by frame rate."""
        return Counter(f"{rate:.4g}" for rate in self.annotations["fps"].to_pylist())

    @cached_property
    def profiles(self) -> Counter[str]:
        """Number of shards by profile."""
        return Counter(str(shard.profile.get("name", "unknown")) for shard in self.generation.shards)

    @cached_property
    def splits(self) -> Mapping[str, Totals]:
        """For each split column, the samples by value; those without a value count as NO_VALUE."""
        names = [name for name in self.annotations.column_names if name.startswith(_SPLIT)]
        found = {name: self._totals(self._values(name)) for name in names}
        return {name: totals for name, totals in found.items() if set(totals) != {NO_VALUE}}

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns that came with the sources, in the order of the annotations; splits are shown apart."""
        ours = _OURS | ANNOTATION_FIELDS.keys() | FACT_FIELDS.keys() | self.splits.keys()
        return tuple(
            _column(name, self.annotations[name]) for name in self.annotations.column_names if name not in ours
        )

    @cached_property
    def class_counts(self) -> tuple[ClassCount, ...]:
        """Every class, including empty ones, most samples first."""
        totals, first = self._totals(self.class_names), next(iter(self.splits), None)
        values = self._values(first) if first else self.class_names
        pairs = self._totals(list(zip(self.class_names, values, strict=True)))
        classes = []
        for name in dict.fromkeys([*self.generation.classes, *totals]):
            splits = {value: pairs[name, value] for value in self.splits.get(first or "", ()) if (name, value) in pairs}
            classes.append(ClassCount(name, *totals.get(name, Total(0, 0.0)), splits))
        return tuple(sorted(classes, key=lambda c: (c.name == UNLABELLED, -c.count, c.name)))

    @property
    def labelled(self) -> tuple[ClassCount, ...]:
        """Every class, without the samples that have none."""
        return tuple(c for c in self.class_counts if c.name != UNLABELLED)

    @property
    def is_labelled(self) -> bool:
        """Whether any sample has a class."""
        return any(c.count for c in self.labelled)

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

    @cached_property
    def statuses(self) -> Counter[str]:
        """Number of sources by what became of them: packed, rejected or removed."""
        return Counter() if self.ledger is None else Counter(self.ledger["status"].to_pylist())

    @cached_property
    def duplicates(self) -> int:
        """Number of sources with the same bytes as an earlier one."""
        warnings = [] if self.ledger is None else self.ledger["warnings"].to_pylist()
        return sum("duplicate" in (row or ()) for row in warnings)

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
            "generations": [{name: getattr(one, name) for name in _TOLD} for one in self.history],
            "samples": self.num_samples,
            "removed": self.removed,
            "shards": len(self.generation.shards),
            "tar_bytes": self.tar_bytes,
            "in_place": self.in_place,
            "frames": int(self.num_frames.sum()),
            "seconds": float(self.seconds.sum()),
            "streams": list(self.generation.streams),
            "profiles": dict(self.profiles),
            "classes": {c.name: c.to_json() for c in self.class_counts},
            "splits": {
                name: {value: total._asdict() for value, total in totals.items()}
                for name, totals in self.splits.items()
            },
            "columns": {one.name: {"type": one.kind, "missing": one.missing} for one in self.columns},
            "sizes": dict(self.sizes),
            "rates": dict(self.rates),
            "encoding": self.encoding.to_json(),
            "sources": self.sources,
            "rejected": dict(self.rejected),
            "statuses": dict(self.statuses),
            "duplicates": self.duplicates,
        }

    def _values(self, column: str) -> list[str]:
        return [NO_VALUE if value is None else str(value) for value in self.annotations[column].to_pylist()]

    def _totals(self, values: Sequence[Any]) -> Totals:
        found: dict[Any, Total] = {}
        for value, seconds in zip(values, self.seconds.tolist(), strict=True):
            total = found.get(value, Total(0, 0.0))
            found[value] = Total(total.samples + 1, total.seconds + seconds)
        return dict(sorted(found.items(), key=lambda item: -item[1].samples))


def summarize(url: str, *, generation: int | str | None = None) -> Summary:
    """Summarise a dataset from its tables."""
    storage = open_storage(url)
    dataset_id, record = read_generation(storage, generation)
    annotations = read_annotations(storage, record)
    hidden = annotations["removed"].to_numpy()
    return Summary(
        url=storage.url,
        dataset_id=dataset_id,
        generation=record,
        history=tuple(history(storage, read_head(storage))),
        annotations=annotations.filter(pa.array(~hidden)),
        encoding=read_encoding(storage, record, ~hidden),
        removed=int(np.count_nonzero(hidden)),
        ledger=read_ledger(storage)[0] if storage.exists(LEDGER) else None,
    )


def describe(summary: Summary) -> dict[str, str]:
    """Return texts, by name, on the duration, size and encoding of the samples; there must be at least one."""
    encoding, extras = summary.encoding, summary.generation.extras
    shortest, median, longest = map(duration, np.quantile(summary.seconds, [0, 0.5, 1]).tolist())
    places = [f"{size(summary.tar_bytes)} of tars"] if summary.tar_bytes else []
    places += [f"{things(summary.in_place, 'video')} in place"] if summary.in_place else []
    found = {
        "video": f"{duration(float(summary.seconds.sum()))}, {things(int(summary.num_frames.sum()), 'frame')}",
        "duration": f"{shortest} shortest, {median} median, {longest} longest",
        "size": shares(summary.sizes),
        "rate": shares(Counter({f"{rate} fps": number for rate, number in summary.rates.items()})),
        "bytes": " and ".join(places),
    }
    if encoding.samples:
        per_clip = size(encoding.bytes / encoding.samples)
        found["bytes"] += f", {per_clip} per clip, {encoding.bit_rate / 1000:.0f} kbit/s"
        found["colour"] = shares(encoding.colours)
        found["codec"] = f"{shares(encoding.codecs)}; profile {', '.join(sorted(summary.profiles))}"
        rare = percent(encoding.droppable_share, 1)
        found["packets"] = f"{encoding.packets_per_key:.1f} per key frame, {rare} are not referenced"
        found["decoding"] = _decoding(encoding)
        if encoding.conforming < encoding.samples and summary.tar_bytes:
            found["conforming"] = percent(encoding.conforming, encoding.samples)
        if encoding.whole:
            share = percent(encoding.whole, encoding.samples)
            found["whole"] = f"{share} of the samples are decoded from their first packet"
        if encoding.shards_read < encoding.of:
            read = f"{count(encoding.shards_read)} of {things(encoding.of, 'shard')}"
            found[""] = f"bytes per clip, colour, codec and packets are those of {read}"
    if len(summary.generation.streams) > 1:
        found["streams" if "flow" in extras else "cameras"] = ", ".join(summary.generation.streams)
    if signals := extras.get(SIGNALS):
        found["signals"] = ", ".join(f"{name} {one['shape']}" for name, one in signals.items())
    if flow := extras.get("flow"):
        found["flow"] = f"{flow['method']} by OpenCV {flow['opencv']}, up to {flow['bound']:g} pixels per frame"
    if "audio" in extras:
        found["audio"] = {"copy": "AAC and ALAC copied, others as AAC"}.get(extras["audio"], "AAC")
    return found


def _decoding(encoding: EncodingSummary) -> str:
    """Return, as text, how many packets must be decoded for one frame on average."""
    referenced, alone = encoding.packets_per_key * (1 - encoding.droppable_share), encoding.droppable_share
    if referenced < 1:  # all-intra: no packet refers to another
        referenced, alone = 1, max(0, alone - 1 / encoding.packets_per_key)
    # On average, the packets before the frame in its GOP that others refer to, and the frame's own packet.
    fed = (referenced + 1) / 2 + alone
    text = f"{fed:.1f} packets for one frame"
    if encoding.arithmetic:
        text += f"; {percent(encoding.arithmetic, encoding.samples)} of the samples are H.264 with CABAC, which takes"
        text += " longer than what profiles write (x264's tune fastdecode)"
    return text


def _column(name: str, values: pa.ChunkedArray) -> Column:
    present = values.drop_null()
    # Enough rows to find different values, few enough to be quick.
    seen = present.slice(0, _LOOKED_AT).to_pylist()
    some = dict.fromkeys(f"{value:.6g}" if isinstance(value, float) else words(value) for value in seen)
    return Column(name, str(values.type), len(values) - len(present), tuple(itertools.islice(some, _EXAMPLES)))
