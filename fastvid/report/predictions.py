"""Predictions as a picture: the frames a model saw and what it said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from matplotlib.image import imsave

from fastvid.errors import UsageError
from fastvid.report import page as html

_GAP = 3  # white pixels between frames


class Predicted(Protocol):
    """What is drawn."""

    @property
    def video(self) -> str: ...

    @property
    def top(self) -> Sequence[tuple[str, float]]: ...

    @property
    def frames(self) -> Sequence[int]: ...

    @property
    def pictures(self) -> npt.NDArray[np.uint8]: ...


def write(path: Path, predictions: Sequence[Predicted]) -> None:
    """Writes a .png of all strips below each other, or a .html page with the classes beside them.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        if path.suffix == ".png":
            imsave(path, _stacked([strip(one.pictures) for one in predictions]))
        else:
            path.write_text(_page(predictions), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"picture cannot be written: {error.strerror}", file=path) from error


def strip(pictures: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Frames uint8 [T, H, W, 3] side by side: [H, T * (W + gap) - gap, 3]."""
    spaced = np.pad(pictures, ((0, 0), (0, 0), (0, _GAP), (0, 0)), constant_values=255)
    row: npt.NDArray[np.uint8] = np.concatenate(list(spaced), axis=1)[:, :-_GAP]
    return row


def _stacked(strips: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    width = max(one.shape[1] for one in strips)
    rows = [np.pad(one, ((0, _GAP), (0, width - one.shape[1]), (0, 0)), constant_values=255) for one in strips]
    whole: npt.NDArray[np.uint8] = np.concatenate(rows)[:-_GAP]
    return whole


def _page(predictions: Sequence[Predicted]) -> str:
    cards = []
    for one in predictions:
        rows = [(name, f"{100 * share:.1f} %") for name, share in one.top]
        picture = html.picture(strip(one.pictures), f"frames of {one.video}")
        body = f'<div class="wide">{picture}</div>{html.table(("", ""), rows)}'
        cards.append(html.card(one.video, body, f"frames {', '.join(map(str, one.frames))}"))
    lead = "The frames a model saw, in order, and the classes it finds likeliest."
    return html.page("fastvid predict", lead, "\n".join(cards))
