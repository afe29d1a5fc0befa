"""Predictions as a picture: the frames a model saw and what it said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.report.charts import bars
from fastvid.report.markup import card, film_strip, picture, png, table
from fastvid.report.page import Section, document

_GAP: Final = 3  # white pixels between strips
_STYLE: Final = """
.seen { overflow-x: auto; margin-bottom: 16px; border-radius: 6px; }
.seen img { display: block; max-width: max(100%, 900px); }
"""


class Predicted(Protocol):
    """What is drawn."""

    @property
    def video(self) -> str: ...

    @property
    def top(self) -> Sequence[tuple[str, float]]: ...

    @property
    def frames(self) -> Sequence[int]: ...

    @property
    def probabilities(self) -> bool: ...

    @property
    def pictures(self) -> npt.NDArray[np.uint8]: ...


def write(path: Path, predictions: Sequence[Predicted]) -> None:
    """Writes a .png of all strips below each other, or a .html page with the classes beside them."""
    strips = [film_strip(one.pictures) for one in predictions]
    try:
        if path.suffix == ".png":
            path.write_bytes(png(_stacked(strips)))
        else:
            path.write_text(_page(predictions, strips), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"picture cannot be written: {error.strerror}", file=path) from error


def _stacked(strips: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    width = max(one.shape[1] for one in strips)
    rows = [np.pad(one, ((0, _GAP), (0, width - one.shape[1]), (0, 0)), constant_values=255) for one in strips]
    whole: npt.NDArray[np.uint8] = np.concatenate(rows)[:-_GAP]
    return whole


def _page(predictions: Sequence[Predicted], strips: Sequence[npt.NDArray[np.uint8]]) -> str:
    cards = []
    for one, pixels in zip(predictions, strips, strict=True):
        if one.probabilities:
            shares = bars({name: 100 * share for name, share in one.top}, label="{:.1f} %".format)
        else:
            shares = table(("column", "predicted"), [(name, f"{value:.4g}") for name, value in one.top])
        seen = f'<div class="seen">{picture(pixels, f"frames of {one.video}")}</div>'
        cards.append(card(one.video, seen + shares, f"frames {', '.join(map(str, one.frames))}"))
    return document(
        "Predictions",
        [Section("Videos", "".join(cards), "The frames a model saw, in order, and what it predicts.")],
        command="predict",
        style=_STYLE,
    )
