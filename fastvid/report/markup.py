"""HTML building blocks: escaped text, cards, tables, numbers, pictures. All text on a page goes through `text`."""

from __future__ import annotations

import base64
import html
import re
import struct
import unicodedata
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_REPLACED: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_NUMBER: Final = re.compile(r"[<>~+-]?\d[\d,.]*(?:[eE][+-]?\d+)?(?:[%x]|\s.*)?")
_RIGHT: Final = ("", ' class="num"')
_PNG_KINDS: Final = {3: 2, 4: 6}  # channels to PNG's colour type: RGB, RGBA


class Markup(str):
    """Markup for a cell or a row of a table; any other string is escaped there."""

    __slots__ = ()


def text(value: object) -> str:
    """Return a value as HTML text, also usable in a quoted attribute.

    Characters that could reorder or hide the text around them are written as escapes.
    """
    plain = "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in _REPLACED else letter for letter in str(value)
    )
    return html.escape(plain, quote=True)


def card(title: str, body: str, note: str = "", aside: str = "") -> str:
    """Return a panel. `body` is markup; the title, the note below it and `aside` on the right are text."""
    beside = f"<span>{text(aside)}</span>" if aside else ""
    head = f'<div class="head"><h3>{text(title)}</h3>{beside}</div>' if title else ""
    below = f"<p>{text(note)}</p>" if note else ""
    return f'<div class="card">{head}{below}{body}</div>'


def grid(*cards: str) -> str:
    """Return cards side by side, stacked on a narrow screen."""
    return f'<div class="grid">{"".join(cards)}</div>'


def figures(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Return large numbers in a row, each as (label, value with unit, remark), all text."""
    listed = "".join(
        f'<div class="kpi"><div class="label">{text(label)}</div><div class="value">{_small_unit(value)}</div>'
        f'<div class="sub">{text(remark)}</div></div>'
        for label, value, remark in numbers
    )
    return f'<div class="kpis">{listed}</div>'


def _small_unit(value: str) -> str:
    """Return a value with its units in a smaller font."""
    if value[:1] not in "<>-0123456789":
        return text(value)
    parts = [text(part) if part[:1] in "<>-0123456789" else f"<small>{text(part)}</small>" for part in value.split(" ")]
    return "&#8239;".join(parts)


def definitions(rows: Mapping[str, object]) -> str:
    """Return names and values in two columns."""
    listed = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows.items())
    return f'<dl class="facts">{listed}</dl>'


def bullets(items: Iterable[str]) -> str:
    """Return texts as a list."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


def row(cells: Sequence[str], numeric: Sequence[bool], attributes: str = "") -> Markup:
    """Return a row of a table from text or `Markup` cells. `attributes` is markup inside the row's tag."""
    listed = "".join(
        f"<td{_RIGHT[number]}>{cell if isinstance(cell, Markup) else text(cell)}</td>"
        for cell, number in zip(cells, numeric, strict=True)
    )
    return Markup(f"<tr{attributes}>{listed}</tr>")


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    marked: Collection[str] = (),
    numeric: Sequence[bool] | None = None,
    attributes: str = "",
) -> str:
    """Return a table that scrolls horizontally if it is wider than the screen.

    `heads`: column heads as text; if all are empty, there is no head row. `rows`: cells as text or `Markup`, or
    whole rows made by `row`. `marked`: first cells of the rows to highlight.
    """
    if numeric is None:
        columns = [[cells[n] for cells in rows if cells[n] not in ("", "-")] for n in range(len(heads))]
        numeric = [
            n > 0 and 2 * len([*filter(_NUMBER.fullmatch, column)]) > len(column) for n, column in enumerate(columns)
        ]
    head = "".join(f"<th{_RIGHT[number]}>{text(name)}</th>" for name, number in zip(heads, numeric, strict=True))
    body = "".join(
        cells if isinstance(cells, Markup) else row(cells, numeric, ' class="marked"' if cells[0] in marked else "")
        for cells in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="table"><table{attributes}>{head}<tbody>{body}</tbody></table></div>'


def picture(pixels: npt.NDArray[np.uint8], alt: str) -> str:
    """Return an image, uint8 [H, W, 3] or [H, W, 4], embedded in the page."""
    data = base64.b64encode(png(pixels)).decode("ascii")
    return f'<img alt="{text(alt)}" src="data:image/png;base64,{data}">'


def film_strip(frames: npt.NDArray[np.uint8], gap: int = 3) -> npt.NDArray[np.uint8]:
    """Return frames, uint8 [T, H, W, 3], side by side with white gaps: [H, T * (W + gap) - gap, 3]."""
    spaced = np.pad(frames, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=255)
    joined: npt.NDArray[np.uint8] = np.concatenate(list(spaced), axis=1)[:, :-gap]
    return joined


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode uint8 [H, W, 3] or [H, W, 4] as a PNG file (ISO/IEC 15948), with the filter "Sub"."""
    height, width, channels = pixels.shape
    lines = np.diff(pixels, axis=1, prepend=np.zeros((height, 1, channels), np.uint8)).reshape(height, -1)
    filtered = np.insert(lines, 0, 1, axis=1)  # 1 is the filter "Sub"
    chunks = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, _PNG_KINDS[channels], 0, 0, 0)),
        (b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
