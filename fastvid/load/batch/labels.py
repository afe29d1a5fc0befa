"""Batch entries from annotations and signals: labels, texts, columns, and numbers that belong to each frame.

`MultiHot`: several labels per sample, as a row of zeros and ones. `Text`: one text a row, chosen among several and
sometimes dropped, as a function of (seed, epoch, position).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.decode.sound import Audio
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import PICTURES
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.timed_sampling import Deltas
from fastvid.load.order.epoch import EveryFrame
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.runtime.arrays import BoolArray, Float32Array, IntArray
from fastvid.runtime.values import check_choice, check_kind, check_numbers, check_share, sha256

_LABELS: Final = "labels"
"""The column whose values are, like those of ``label``, classes of the dataset."""


@dataclass(frozen=True, repr=False)
class MultiHot:
    """Several labels per sample, from an annotation column of lists: `Batch.labels`, float32 [B, C].

    An element is 1 if the sample has the class and 0 if not. A sample without labels has a row of zeros and stays
    valid: it has none of the classes. Masked rows are zeros too; use `Batch.valid` or `Batch.weight` to ignore them.

    Args:
        column: A column of lists, either of class names or of class numbers.
        classes: Class names, at least one; C is their number, and the class number is the index. By default those of
            the dataset for the column ``labels`` if it has any, otherwise all values of the column in the dataset,
            whatever its split or filter: names in alphabetical order, or numbers from 0 to the largest.

    Raises:
        UsageError: If the classes are invalid.
    """

    column: str
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_kind("column of MultiHot", self.column, str, use='MultiHot("labels")')
        if self.classes is None:
            return
        classes = tuple(self.classes) if isinstance(self.classes, list | tuple) else ()
        if not classes or len(set(classes)) < len(classes) or not all(isinstance(name, str) for name in classes):
            hint = "give the names of all classes, each once, as strings"
            raise UsageError(f"classes of MultiHot are {self.classes!r}", hint=hint)
        object.__setattr__(self, "classes", classes)

    def __repr__(self) -> str:
        # Part of a loader's fingerprint, so it must be short: a dataset may have thousands of classes.
        if self.classes is None:
            return f"MultiHot({self.column!r})"
        digest = sha256("\n".join(self.classes).encode())[:16]
        return f"MultiHot({self.column!r}, {len(self.classes)} classes {digest})"


class MultiHotLabels:
    """The labels of all samples of a dataset, from a column of lists."""

    def __init__(self, labels: MultiHot, dataset: Dataset | Mixture) -> None:
        what = "lists", "add a column with a list of class names to the annotations"
        column = _column(dataset, labels.column, "MultiHot", _contains_labels, *what)
        classes = labels.classes or _default_classes(labels.column, dataset)
        self.labels = replace(labels, classes=classes)
        samples, values = _pairs(column)
        if pa.types.is_integer(values.type):
            numbers = values.to_numpy().astype(np.int64)
            known = (numbers >= 0) & (numbers < len(classes))
        else:
            found = pc.index_in(values, pa.array(classes, values.type))
            known = found.is_valid().to_numpy(zero_copy_only=False)
            numbers = found.fill_null(-1).to_numpy().astype(np.int64)
        if not known.all():
            first = int(np.flatnonzero(~known)[0])
            value = values[first].as_py()
            told = f"column {labels.column!r} contains {value!r}, which is none of the {len(classes)} classes"
            hint = "add it to MultiHot(classes=...), or correct the annotations"
            raise UsageError(told, key=dataset.key(int(samples[first])), hint=hint)
        self._numbers = numbers.astype(np.int32)
        self._stops = np.cumsum(np.bincount(samples, minlength=len(column)))

    def rows(self, samples: IntArray, valid: BoolArray) -> Float32Array:
        """Return the labels of a batch's rows, float32 [B, C].

        `samples`: sample of each row, int64 [B]. `valid`: which rows are not masked, bool [B].
        """
        assert self.labels.classes is not None
        made = np.zeros((len(samples), len(self.labels.classes)), dtype=np.float32)
        for row in np.flatnonzero(valid).tolist():
            sample = int(samples[row])
            start = self._stops[sample - 1] if sample else 0
            made[row, self._numbers[start : self._stops[sample]]] = 1
        return made


def _column(
    dataset: Dataset | Mixture, name: str, whose: str, fits: Callable[[pa.DataType], bool], what: str, otherwise: str
) -> pa.ChunkedArray:
    """Return a column of the dataset; raise UsageError if its type does not satisfy `fits`.

    `whose`: the argument that names the column. `what`: the content that it needs. `otherwise`: hint if none fits.
    """
    column = dataset.column(name) if name in dataset.column_names else None
    if column is None or not fits(column.type):
        found = "does not exist" if column is None else f"contains {column.type}, not {what}"
        others = [other for other in dataset.column_names if fits(dataset.column(other).type)]
        hint = f"use one of {', '.join(others)}" if others else otherwise
        raise UsageError(f"column {name!r} of {whose} {found}", hint=hint)
    return column


def _default_classes(column: str, dataset: Dataset | Mixture) -> tuple[str, ...]:
    if column == _LABELS and dataset.classes:
        return dataset.classes
    parts = parts_of(dataset)
    # Of all rows, not only the selected ones: the splits of a dataset must have the same classes.
    tables = [part.annotations for part in parts if column in part.annotations.column_names]
    found = {value for table in tables for value in pc.unique(_pairs(table[column])[1]).to_pylist()}
    if not found:
        raise UsageError(f"column {column!r} has no labels at all", hint="give MultiHot(classes=...)")
    numbers = [value for value in found if isinstance(value, int)]
    if not numbers:
        return tuple(sorted(found))
    if min(numbers) < 0:
        raise UsageError(f"column {column!r} contains class number {min(numbers)}", hint="number classes from 0")
    return tuple(str(number) for number in range(max(numbers) + 1))


def _pairs(column: pa.ChunkedArray) -> tuple[IntArray, pa.Array]:
    """Return the row, int64 [n], and the value of each element that is not null in a column of lists."""
    rows, values = [np.empty(0, dtype=np.int64)], []
    start = 0
    for chunk in column.chunks:
        flat = pc.list_flatten(chunk)
        if pa.types.is_dictionary(flat.type):
            flat = flat.cast(flat.type.value_type)
        present = flat.is_valid()
        rows.append(start + np.asarray(pc.list_parent_indices(chunk).filter(present), dtype=np.int64))
        values.append(flat.filter(present))
        start += len(chunk)
    if not values:
        return rows[0], pa.array([], pa.string())
    return np.concatenate(rows), pa.concat_arrays(values)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _element(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list's elements, or a type that is no list; without its encoding as a dictionary."""
    kind = kind.value_type if _is_list(kind) else kind
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _contains_labels(kind: pa.DataType) -> bool:
    element = _element(kind)
    is_known = pa.types.is_integer(element) or pa.types.is_string(element) or pa.types.is_large_string(element)
    return bool(_is_list(kind) and is_known)


Choose = Literal["random", "first"]


@dataclass(frozen=True)
class Text:
    """One text per row, `Batch.text`, from annotation columns of strings or of lists of strings.

    The texts of a sample are those of all columns, in the order of the columns; nulls and empty strings do not count.
    A choice belongs to a position of an epoch, so it is the same for any world size and after a resume, and each of
    `clips_per_video` clips has its own.

    Args:
        columns: A column, or several.
        choose: "random", or "first" for the first text that the sample has.
        drop: Probability that a row gets `empty` instead, 0 to 1, for instance for classifier-free guidance.
        empty: The text of a row that was dropped, has no text or is padding.
        weights: Relative probability of each column, positive, for choose="random"; the texts of a column share its
            weight, and a column without a text does not take part. By default all texts are equally probable.

    Raises:
        UsageError: If an argument is invalid.
    """

    columns: str | Sequence[str]
    choose: Choose = "random"
    drop: float = 0.0
    empty: str = ""
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_kind("columns of Text", self.columns, str, Sequence, use='Text("caption")')
        # Normalise, so that equal arguments have the same fingerprint.
        object.__setattr__(self, "columns", self.names)
        check_choice("choose", self.choose, get_args(Choose))
        texts = all(isinstance(name, str) for name in self.names)
        if not texts or not self.names or len(set(self.names)) < len(self.names):
            raise UsageError(f"columns of Text are {self.names}", hint="give one column or more, each once")
        check_share("drop", self.drop)
        if self.weights is None:
            return
        weights = check_numbers("weights", self.weights)
        if len(weights) != len(self.names) or not all(0 < weight < math.inf for weight in weights):
            hint = "give one positive number for each column"
            raise UsageError(f"weights of Text are {weights} for the columns {', '.join(self.names)}", hint=hint)
        if self.choose != "random":
            raise UsageError(f"weights were given with choose={self.choose!r}", hint="use choose='random'")
        object.__setattr__(self, "weights", weights)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns."""
        return (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)


class TextColumns:
    """The texts of all samples of a dataset, from one or more columns."""

    def __init__(self, text: Text, dataset: Dataset | Mixture) -> None:
        what = ("Text", _contains_text, "text", "add captions to the annotations")
        self.text, self._columns = text, [_column(dataset, name, *what) for name in text.names]

    def row(self, sample: int | None, chosen: float, dropped: float) -> str:
        """Return the text of a row; `chosen` and `dropped`, random in [0, 1), choose it and decide if it is dropped."""
        text = self.text
        if sample is None:
            return text.empty
        each = [_texts(column[sample].as_py()) for column in self._columns]
        found = [one for texts in each for one in texts]
        if not found or dropped < text.drop:
            return text.empty
        if text.choose == "first":
            return found[0]
        shares = text.weights or [float(len(texts)) for texts in each]
        weights = [share / len(texts) for share, texts in zip(shares, each, strict=True) for _ in texts]
        ends = list(accumulate(weights))
        return found[min(bisect_right(ends, chosen * ends[-1]), len(found) - 1)]


def _texts(value: str | Sequence[str | None] | None) -> list[str]:
    listed = [value] if value is None or isinstance(value, str) else value
    return [one for one in listed if one]


def _contains_text(kind: pa.DataType) -> bool:
    element = _element(kind)
    return bool(pa.types.is_string(element) or pa.types.is_large_string(element) or pa.types.is_string_view(element))


IGNORED_LABEL: Final = -100
"""Label of masked and unlabelled rows: the default ignore_index of torch's cross_entropy."""


SignalsAsked = Mapping[str, Deltas | None] | Sequence[str]
"""Names of signals. With `Deltas`: at these offsets in seconds from each item; without: at the frames of the clip."""


@dataclass(frozen=True)
class Extras:
    """What a batch contains besides its pictures.

    Args:
        audio: The sound of the clips, `Audio(rate)`, in `Batch.audio`; not with `views`.
        text: One text per row, in `Batch.text`: chosen among the texts of a sample, and sometimes dropped.
        labels: Several labels per sample, in `Batch.labels`; `loader.labels.classes` names the classes.
        fields: Annotation columns to deliver in `Batch.fields`.
        signals: Numbers that the dataset stores for every frame, in entries of their names, [B, T] or [B, T, A]. A list
            of names delivers those of the frames that a clip shows; a mapping such as ``{"action": Deltas([0.0])}``
            those at offsets from each item of `EveryFrame`. ``"mass=weight"`` delivers the signal "weight" in the entry
            "mass": a signal must not replace another entry.
    """

    audio: Audio | None = None
    text: Text | None = None
    labels: MultiHot | None = None
    fields: Sequence[str] = ()
    signals: SignalsAsked = ()

    def __post_init__(self) -> None:
        for name in ("fields", "signals"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        signals = self.signals.items() if isinstance(self.signals, Mapping) else ()
        for name, value, kind, example in (
            ("audio", self.audio, Audio, "Audio(16_000)"),
            ("text", self.text, Text, 'Text("caption")'),
            ("labels", self.labels, MultiHot, 'MultiHot("labels")'),
            *((f"signal {name!r}", deltas, Deltas, "Deltas([0.0, 0.1])") for name, deltas in signals),
        ):
            if value is not None:
                check_kind(name, value, kind, use=example)
        for name, names in (("fields", self.fields), ("signals", self.signals)):
            if not isinstance(names, Iterable) or not all(isinstance(one, str) for one in names):
                raise UsageError(f"{name} is {names!r}, expected names", hint=f"use a list, {name}=['action']")


@dataclass(frozen=True, slots=True, eq=False)
class SignalRows:
    """The signals of the rows of a batch, and which frames around an item are outside its video."""

    dataset: Dataset  # the samples, or the items of `EveryFrame`
    # offsets from the item at which each signal is read; None to read it at the frames that the clip shows.
    wanted: Mapping[str, Deltas | None]
    # offsets of the frames of each stream, by batch entry; a frame outside the video is replaced by its first or last.
    shown: Mapping[str, Deltas]

    @classmethod
    def of(
        cls, dataset: Dataset | Mixture, frames: object, streams: Sequence[str], asked: SignalsAsked, *, views: bool
    ) -> SignalRows | None:
        """Build from a loader's arguments; None if neither signals nor frames around items were requested."""
        wanted: dict[str, Deltas | None] = dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(asked)
        shown = {}
        if isinstance(dataset, EveryFrame) and isinstance(frames, Deltas):
            shown = dict.fromkeys(["video" if name == PICTURES else name for name in streams], frames)
        if not wanted and not shown:
            return None
        if isinstance(dataset, Mixture) or views:
            what = "a mixture" if isinstance(dataset, Mixture) else "views"
            raise UsageError(f"signals and EveryFrame cannot be used with {what}", hint="use one dataset without views")
        taken = {*Batch.__annotations__, *streams, *(f"{entry}_is_pad" for entry in shown)}
        for given, deltas in wanted.items():
            entry, name = entry_of(given, dataset)
            dataset.signals[name]  # UsageError if there is no such signal
            names = {entry} if deltas is None else {entry, f"{entry}_is_pad"}
            if names & taken:
                told = f"signal {name!r} would replace the entry {min(names & taken)!r} of the batch"
                raise UsageError(told, hint=f"give it another name in the batch: signals=[{f'my_{name}={name}'!r}]")
            taken |= names
            if deltas is not None and (not isinstance(dataset, EveryFrame) or deltas.anchor is not None):
                raise UsageError(
                    f"signal {name!r} was asked for at {deltas!r}, but there are no items to count from",
                    hint="load EveryFrame(dataset), or give the names of signals alone: those of the frames shown",
                )
        return cls(dataset, wanted, shown)

    def rows(self, samples: IntArray, valid: BoolArray, shown: IntArray) -> dict[str, npt.NDArray[Any]]:
        """Return the signals, [B, T] or [B, T, A], zero in masked rows; and ``NAME_is_pad``, bool [B, T], for each with
        Deltas, and for the streams of items, True in masked rows.

        `samples`: sample or item of each row, int64 [B]. `valid`: which rows are not masked, bool [B]. `shown`:
        frames that each row shows, int64 [B, T]; -1 for none.
        """
        chosen = np.where(valid, samples, 0)
        items = self.dataset if isinstance(self.dataset, EveryFrame) else None
        of, at = (chosen, shown[:, 0]) if items is None else items.place(chosen)
        dataset = self.dataset if items is None else items.samples
        rows, counts = dataset.rows[of], dataset.num_frames[of][:, None]
        rates = dataset.annotations["fps"].take(rows).to_numpy() if items is not None else np.empty(0)

        def around(deltas: Deltas) -> tuple[IntArray, BoolArray]:
            """Return the frames at offsets from the items, int64 [B, T], and which are outside the video, bool."""
            offsets = {float(rate): deltas.offsets(float(rate)) for rate in np.unique(rates)}
            frames = at[:, None] + np.stack([offsets[float(rate)] for rate in rates])
            return frames, (frames < 0) | (frames >= counts)

        pads = {id(deltas): around(deltas)[1] | ~valid[:, None] for deltas in self.shown.values()}
        made: dict[str, npt.NDArray[Any]] = {f"{name}_is_pad": pads[id(deltas)] for name, deltas in self.shown.items()}
        for given, deltas in self.wanted.items():
            entry, name = entry_of(given, dataset)
            frames, outside = (shown, shown < 0) if deltas is None else around(deltas)
            values = np.ascontiguousarray(dataset.signals.values(name, rows, np.clip(frames, 0, counts - 1)))
            values[~valid] = 0
            if deltas is None:
                values[outside] = 0
            else:
                made[f"{entry}_is_pad"] = outside | ~valid[:, None]
            made[entry] = values
        return made


def entry_of(given: str, dataset: Dataset) -> tuple[str, str]:
    """Return the batch entry and the signal that are named by ``ENTRY=SIGNAL``, or by a signal's name alone."""
    entry, equals, name = given.partition("=")
    return (entry, name) if equals and given not in dataset.signals else (given, given)
