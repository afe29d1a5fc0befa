"""HTML files and fragments of escaped text, cards, tables, numbers and pictures.

All data from outside fastvid is escaped by `text`. A page's Content-Security-Policy forbids network access and every
script except the one whose hash it contains, so a hostile file name could do nothing even if it were not escaped.

A fragment is HTML for display in a notebook. A notebook's theme may differ from the browser's, so text and lines
inherit their colour from it and nothing has a background.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import struct
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Final

import numpy as np
import numpy.typing as npt

import fastvid
from fastvid.runtime.values import words

_REPLACED: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # Unicode categories of characters to escape
_JOINERS: Final = "\u200c\u200d"  # part of emoji and of words in Persian and Hindi
_NUMBER: Final = re.compile(r"[<>~+-]?\d[\d,.]*(?:[eE][+-]?\d+)?(?:[%x]|\s.*)?")
_RIGHT: Final = ("", ' class="num"')
_LINKS: Final = 10  # maximum number of sections with links in the bar at the top; more are listed below the title
GAP: Final = 3
"""White pixels between pictures."""
_PNG_KINDS: Final = {3: 2, 4: 6}  # channels to PNG's colour type: RGB, RGBA


class Markup(str):
    """Markup for a cell or a row of a table; any other string is escaped there."""

    __slots__ = ()


def text(value: object) -> str:
    """Return a value as HTML text, also usable in a quoted attribute.

    Characters that could reorder or hide the text around them are written as escapes.
    """
    plain = "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in _REPLACED and letter not in _JOINERS else letter
        for letter in str(value)
    )
    return html.escape(plain, quote=True)


def card(title: str, body: str, note: str = "", aside: str = "") -> str:
    """Return a panel as HTML. `body` is markup; title, `note` (below the title) and `aside` (on the right) are text."""
    beside = f"<span>{text(aside)}</span>" if aside else ""
    head = f'<div class="head"><h3>{text(title)}</h3>{beside}</div>' if title else ""
    below = f"<p>{text(note)}</p>" if note else ""
    return f'<div class="card">{head}{below}{body}</div>'


def grid(*cards: str) -> str:
    """Return cards side by side, stacked on a narrow screen."""
    return f'<div class="grid">{"".join(cards)}</div>'


def figures(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of large numbers, each given as (label, value with unit, remark), all text."""
    listed = "".join(
        f'<div class="kpi"><div class="label">{text(label)}</div><div class="value">{_small_unit(value)}</div>'
        f'<div class="sub">{text(remark)}</div></div>'
        for label, value, remark in numbers
    )
    return f'<div class="kpis">{listed}</div>'


def _small_unit(value: str) -> str:
    """Return a value such as "12 clips/s" as HTML with its units in a smaller font."""
    if value[:1] not in "<>-0123456789":
        return text(value)
    parts = [text(part) if part[:1] in "<>-0123456789" else f"<small>{text(part)}</small>" for part in value.split(" ")]
    return "&#8239;".join(parts)


def definitions(rows: Mapping[str, object]) -> str:
    """Return names and values in two columns, without empty values."""
    known = {name: words(value) for name, value in rows.items()}
    listed = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in known.items() if value)
    return f'<dl class="facts">{listed}</dl>'


def row(cells: Sequence[str], numeric: Sequence[bool]) -> Markup:
    """Return a row of a table from cells of text or `Markup`; `numeric`: which columns contain numbers."""
    listed = "".join(
        f"<td{_RIGHT[number]}>{cell if isinstance(cell, Markup) else text(cell)}</td>"
        for cell, number in zip(cells, numeric, strict=True)
    )
    return Markup(f"<tr>{listed}</tr>")


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[bool] | None = None,
    attributes: str = "",
) -> str:
    """Return a table that scrolls horizontally if it is wider than the screen.

    `heads`: column heads as text; if all are empty, there is no head row. `rows`: cells as text or `Markup`, or
    whole rows from `row`. `numeric`: which columns contain numbers; None guesses it from the cells. `attributes`:
    further attributes of the table element, as markup.
    """
    if numeric is None:
        columns = [[cells[n] for cells in rows if cells[n] not in ("", "-")] for n in range(len(heads))]
        numeric = [
            n > 0 and 2 * len([*filter(_NUMBER.fullmatch, column)]) > len(column) for n, column in enumerate(columns)
        ]
    head = "".join(f"<th{_RIGHT[number]}>{text(name)}</th>" for name, number in zip(heads, numeric, strict=True))
    body = "".join(cells if isinstance(cells, Markup) else row(cells, numeric) for cells in rows)
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="table"><table{attributes}>{head}<tbody>{body}</tbody></table></div>'


def picture(pixels: npt.NDArray[np.uint8], alt: str) -> str:
    """Return an image, uint8 [H, W, 3] or [H, W, 4], embedded in the page."""
    data = base64.b64encode(png(pixels)).decode("ascii")
    return f'<img alt="{text(alt)}" src="data:image/png;base64,{data}">'


def film_strip(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return frames, uint8 [T, H, W, 3], side by side with white gaps: [H, T * (W + GAP) - GAP, 3]."""
    spaced = np.pad(frames, ((0, 0), (0, 0), (0, GAP), (0, 0)), constant_values=255)
    joined: npt.NDArray[np.uint8] = np.concatenate(list(spaced), axis=1)[:, :-GAP]
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


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with a heading and a navigation link."""

    title: str
    body: str
    lead: str = ""

    @property
    def anchor(self) -> str:
        """Id of the section in the page."""
        return re.sub(r"\W+", "-", self.title.lower())


def document(
    title: str,
    sections: Sequence[Section],
    *,
    command: str,
    lead: str = "",
    chips: Mapping[str, object] | None = None,
    top: str = "",
    end: str = "",
    style: str = "",
    script: str = "",
) -> str:
    """Return a whole HTML file.

    `command`: the fastvid command that wrote it. `lead`: first paragraph. `chips`: settings to show by name. `top` and
    `end`: markup before the sections and at the end. `style` and `script`: added to those of all pages.
    """
    script = asset("fastvid.report", "page.js") + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline';"
        f" script-src 'sha256-{digest}'"
    )
    links = "".join(f'<a href="#{one.anchor}">{text(one.title)}</a>' for one in sections if len(sections) > 1)
    contents = f'<nav class="contents">{links}</nav>' if len(sections) > _LINKS else ""
    listed = "".join(f'<span class="chip">{text(k)} <b>{text(v)}</b></span>' for k, v in (chips or {}).items())
    body = "".join(
        f'<section id="{one.anchor}"><h2>{text(one.title)}</h2>{_paragraph(one.lead)}{one.body}</section>'
        for one in sections
    )
    return Template(asset("fastvid.report", "page.html")).substitute(
        policy=policy,
        title=text(title),
        style=asset("fastvid.report", "page.css") + style,
        dark=asset("fastvid.report", "dark.css"),
        links="" if contents else links,
        header=_paragraph(lead) + (f'<div class="chips">{listed}</div>' if listed else "") + contents,
        body=top + body,
        version=text(fastvid.__version__),
        command=text(command),
        end=end,
        script=script,
    )


def _paragraph(lead: str) -> str:
    return f'<p class="lead">{text(lead)}</p>' if lead else ""


def asset(package: str, name: str) -> str:
    """Return a file of the folder ``assets`` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


_MISSING: Final = 160  # width of a tile without a picture, in pixels
_LONGEST: Final = 300  # characters of a title or value


def fragment(title: str, facts: Mapping[str, object], body: str = "", note: str = "") -> str:
    """Return the HTML of an object in a notebook. `body` is markup; the rest is text, cut after 300 characters."""
    listed = " ".join(f"<span><i>{text(_cut(k))}</i> {text(_cut(v))}</span>" for k, v in facts.items())
    below = f'<div class="note">{text(_cut(note))}</div>' if note else ""
    return (
        f'<div class="fastvid"><style>{asset("fastvid.report", "fragment.css")}</style>'
        f'<div class="title">{text(_cut(title))}</div>'
        f'<div class="facts">{listed}</div>{body}{below}</div>'
    )


def tiles(listed: Iterable[str]) -> str:
    """Return tiles side by side, in as many rows as the screen needs."""
    return f'<div class="tiles">{"".join(listed)}</div>'


def tile(uri: str, width: int, title: str, *lines: str) -> str:
    """Return a picture, given as a ``data:`` URI and `width` pixels wide, with a title and lines of text below it."""
    return _figure(f'<img alt="{text(_cut(title))}" src="{text(uri)}">', width, title, lines)


def missing_tile(why: str, title: str, *lines: str) -> str:
    """Return a tile that says why there is no picture."""
    return _figure(f'<div class="missing">{text(_cut(why))}</div>', _MISSING, title, lines)


def player(data_uri: str) -> str:
    """Return a player of a video, given as a ``data:`` URI."""
    return f'<video controls loop muted playsinline src="{text(data_uri)}"></video>'


def page(body: str) -> str:
    """Return a whole HTML page with a fragment, in the reader's light or dark theme; the page may load no resources."""
    return Template(asset("fastvid.report", "fragment.html")).substitute(body=body)


def _figure(picture: str, width: int, title: str, lines: Iterable[str]) -> str:
    listed = "".join(f"<span>{text(_cut(line))}</span>" for line in lines)
    return f'<figure style="width: {width}px">{picture}<figcaption>{text(_cut(title))}{listed}</figcaption></figure>'


def _cut(value: object) -> str:
    plain = str(value)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."
