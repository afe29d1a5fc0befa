"""Pages of results: an evaluation with its scores, confusion matrix and classes; predictions with the frames used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.report import page as html
from fastvid.report.charts import bars
from fastvid.runtime.values import count

_PERCENT: Final = "_percent"
_LEAD: Final = "Each video of the split counts once; the predictions for its views are averaged."
_TITLES: Final = {
    "top1_percent": "top-1", "top5_percent": "top-5", "map_percent": "mAP", "mae": "MAE", "rmse": "RMSE", "r2": "R²",
    "taken_for": "most often taken for", "taken_for_videos": "how often",
}  # fmt: skip
_NAMED: Final = 30  # maximum number of classes for a table of counts; with more, the matrix is a picture
_ROW: Final = 16  # frames side by side; more would be too small on a screen
_INK: Final = (0x55, 0x70, 0xFF)  # close to the style sheet's accent, readable on light and dark cards


def page(report: Any) -> str:
    """Return the whole page of an evaluation, a `fastvid.train.run.scoring.EvalReport`."""
    score = report.score
    measured = {name: value for name, value in score.numbers.items() if score.scored and math.isfinite(value)}
    numbers = [
        *((_title(name), _number(name, value), "") for name, value in measured.items()),
        ("Videos scored", count(score.scored), f"of {count(score.total)}"),
        ("Protocol", report.protocol, f"views per video: {report.num_views}"),
    ]
    sections = []
    if report.confusion is not None and score.scored:
        note = "Rows are true classes, columns predicted ones; a stronger colour is a larger fraction of the row."
        sections.append(html.Section("Confusion", html.card("Confusion matrix", _matrix(report), note)))
    if known := [row for row in report.rows if row["videos"]]:
        first, by = next(iter(known[0])), next((name for name in known[0] if name.endswith(_PERCENT)), None)
        known = known if by is None else sorted(known, key=lambda row: float(row[by]))
        notes = [] if by is None else ["Worst first."]
        notes += [f"{count(rest)} without videos left out."] if (rest := len(report.rows) - len(known)) else []
        cells = [tuple(_number(name, value) for name, value in one.items()) for one in known]
        listed = html.table(tuple(map(_title, known[0])), cells)
        sections.append(html.Section(f"By {first}", html.card("", listed, " ".join(notes))))
    return html.document(
        "Evaluation",
        sections,
        command="eval",
        lead=_LEAD if score.scored else "No video was scored.",
        top=html.figures(numbers),
        style=html.asset("fastvid.report", "results.css"),
    )


def _title(name: str) -> str:
    words = _TITLES.get(name, name.removesuffix(_PERCENT).replace("_", " "))
    return words[:1].upper() + words[1:] if words.islower() else words


def _number(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith(_PERCENT):
        return f"{value:.2f} %"
    return count(value) if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _matrix(report: Any) -> str:
    """Return the confusion matrix: a table of counts, or for many classes a picture. A stronger colour is a larger
    fraction of the row (the true class)."""
    counts = np.asarray(report.confusion)
    shares = counts / np.maximum(1.0, counts.sum(1, keepdims=True))
    if len(counts) > _NAMED:
        pixels = np.empty((*shares.shape, 4), np.uint8)
        pixels[...] = (*_INK, 0)
        pixels[..., 3] = np.round(255 * np.sqrt(shares))  # the root keeps a share of 1 % visible
        alt = f"confusion of {len(counts)} classes; the table below names each one's most common error"
        return f'<div class="matrix">{html.picture(pixels, alt)}</div>'
    rows = []
    for name, line, part in zip(report.names, counts.tolist(), shares.tolist(), strict=True):
        cells = [f"<td>{html.text(name)}</td>"]
        for other, number, share in zip(report.names, line, part, strict=True):
            tip = html.text(f"{name} taken for {other}: {number}, {100 * share:.0f} %")
            colour = f"color-mix(in srgb, var(--accent) {60 * share:.0f}%, var(--track))"
            cells.append(f'<td style="background:{colour}" data-tip="{tip}">{number or ""}</td>')
        rows.append(html.Markup(f"<tr>{''.join(cells)}</tr>"))
    return html.table(("", *report.names), rows, numeric=[False] * (1 + len(rows)), attributes=' class="confusion"')


def write(path: Path, predictions: Sequence[Any]) -> None:
    """Write a .png of each video's frames, in rows of 16, or a .html page of the strips with the predictions.

    `path`: ends in .png or .html. `predictions`: each a `fastvid.train.run.scoring.Prediction`.
    """
    strips = [_strip(one.pictures) for one in predictions]
    try:
        if path.suffix == ".png":
            path.write_bytes(html.png(_stacked(strips)))
        else:
            path.write_text(_page(predictions, strips), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"picture cannot be written: {error.strerror}", file=path) from error


def _strip(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return _stacked([html.film_strip(frames[first : first + _ROW]) for first in range(0, len(frames), _ROW)])


def _stacked(strips: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    width = max(one.shape[1] for one in strips)
    rows = [np.pad(one, ((0, html.GAP), (0, width - one.shape[1]), (0, 0)), constant_values=255) for one in strips]
    whole: npt.NDArray[np.uint8] = np.concatenate(rows)[: -html.GAP]
    return whole


def _page(predictions: Sequence[Any], strips: Sequence[npt.NDArray[np.uint8]]) -> str:
    cards = []
    for one, pixels in zip(predictions, strips, strict=True):
        if one.probabilities:
            shares = bars({name: 100 * share for name, share in one.top}, label="{:.1f} %".format)
        else:
            shares = html.table(("column", "predicted"), [(name, f"{value:.4g}") for name, value in one.top])
        seen = f'<div class="seen">{html.picture(pixels, f"frames of {one.video}")}</div>'
        cards.append(html.card(one.video, seen + shares, f"frames {', '.join(map(str, one.frames))}"))
    return html.document(
        "Predictions",
        [html.Section("Videos", "".join(cards), "The frames a model saw, in order, and what it predicts.")],
        command="predict",
        style=html.asset("fastvid.report", "results.css"),
    )
