"""`Text`: one text a row, chosen among several and sometimes dropped, as a function of (seed, epoch, position)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.random_draws import Draws, Purpose
from fastvid.runtime.checks import check_choice

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
        # Normalise, so that equal arguments have the same fingerprint.
        object.__setattr__(self, "columns", self.names)
        check_choice("choose", self.choose, get_args(Choose))
        if not self.names or len(set(self.names)) < len(self.names):
            raise UsageError(f"columns of Text are {self.names}", hint="give one column or more, each once")
        if not 0 <= self.drop <= 1:
            raise UsageError(f"drop is {self.drop}, expected a probability", hint="choose a number from 0 to 1")
        if self.weights is None:
            return
        weights = tuple(float(weight) for weight in self.weights)
        if len(weights) != len(self.names) or not all(0 < weight < math.inf for weight in weights):
            raise UsageError(
                f"weights of Text are {weights} for the columns {', '.join(self.names)}",
                hint="give one positive number for each column",
            )
        if self.choose != "random":
            raise UsageError(f"weights were given with choose={self.choose!r}", hint="use choose='random'")
        object.__setattr__(self, "weights", weights)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns."""
        return (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)


class TextColumns:
    """The texts of a dataset's samples.

    `dataset`: the samples.
    """

    def __init__(self, text: Text, dataset: Dataset | Mixture) -> None:
        self.text, self._columns = text, list[pa.ChunkedArray]()
        for name in text.names:
            column = dataset.column(name) if name in dataset.column_names else None
            if column is None or not _contains_text(column.type):
                found = "does not exist" if column is None else f"contains {column.type}, not text"
                others = [other for other in dataset.column_names if _contains_text(dataset.column(other).type)]
                raise UsageError(
                    f"column {name!r} of Text {found}",
                    hint=f"use one of {', '.join(others)}" if others else "add captions to the annotations",
                )
            self._columns.append(column)

    def row(self, sample: int | None, draws: Draws) -> str:
        """Return the text of a row.

        `draws`: the random numbers of the row's position.
        """
        text = self.text
        if sample is None:
            return text.empty
        each = [_texts(column[sample].as_py()) for column in self._columns]
        found = [one for texts in each for one in texts]
        # Word 0 chooses and word 1 drops, so that drop= does not change which texts are chosen.
        chosen, dropped = draws.uniform(Purpose.TEXT, 2)
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
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
