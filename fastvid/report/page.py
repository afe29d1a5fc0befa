"""HTML building blocks: escaped text, cards, tables, numbers, pictures. All text on a page goes through `text`.

Assembles the HTML file from sections, with a policy that forbids external content.

All data from outside fastvid goes through `markup.text`. The policy forbids the network and every script except the one
whose hash it contains, so that a hostile name could do nothing even if it were not escaped.

HTML for notebooks: fragments with facts and small pictures that take their colours from the page around them.

A notebook's theme is not that of the browser, so text and lines inherit its colour and nothing has a background.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import struct
import unicodedata
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np
import numpy.typing as npt

import fastvid

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


_MARK: Final = (
    '<svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true">'
    '<rect width="22" height="22" rx="6" fill="var(--accent)"/>'
    '<path d="M5 15V7M8.5 15v-4M12 15v-2.5M15.5 15V9.5" stroke="#fff" stroke-width="2" stroke-linecap="round"/></svg>'
)
_MOON: Final = (
    '<svg width="15" height="15" viewBox="0 0 16 16" fill="currentColor" aria-hidden="true">'
    '<path d="M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1Zm0 1.6v10.8A5.4 5.4 0 0 1 8 2.6Z"/></svg>'
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
    """Return the whole file."""
    script = asset("fastvid.report", "page.js") + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline';"
        f" script-src 'sha256-{digest}'"
    )
    links = "".join(f'<a href="#{one.anchor}">{text(one.title)}</a>' for one in sections if len(sections) > 1)
    listed = "".join(f'<span class="chip">{text(k)} <b>{text(v)}</b></span>' for k, v in (chips or {}).items())
    header = f"<h1>{text(title)}</h1>{_paragraph(lead)}" + (f'<div class="chips">{listed}</div>' if listed else "")
    body = "".join(
        f'<section id="{one.anchor}"><h2>{text(one.title)}</h2>{_paragraph(one.lead)}{one.body}</section>'
        for one in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{text(title)} · fastvid</title>\n<style>\n{asset('fastvid.report', 'page.css')}{style}</style>\n"
        '<style id="dark" media="screen and (prefers-color-scheme: dark)">\n'
        f"{asset('fastvid.report', 'dark.css')}</style>\n</head>\n<body>\n"
        f'<nav><div><span class="mark">{_MARK}fastvid</span><div class="links">{links}</div>'
        f'<button id="theme" title="light or dark" aria-label="light or dark">{_MOON}</button></div></nav>\n'
        f"<main><header>{header}</header>{top}{body}"
        f"<footer><span>fastvid {text(fastvid.__version__)} {text(command)}</span>"
        "<span>This page loads nothing from the network.</span></footer></main>\n"
        f'{end}<div id="tip" role="tooltip"></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _paragraph(lead: str) -> str:
    return f'<p class="lead">{text(lead)}</p>' if lead else ""


def asset(package: str, name: str) -> str:
    """Return a file of the folder ``assets`` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


_MISSING: Final = 160  # width of a tile without a picture, in pixels
_LONGEST: Final = 300  # characters of a title or value


def fragment(title: str, facts: Mapping[str, object], body: str = "", note: str = "") -> str:
    """Return the HTML of one object. `body` is markup; the rest is text, cut after 300 characters."""
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
    """Return a fragment as a page of its own, light or dark as the reader prefers, which may load nothing."""
    policy = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>fastvid</title>\n</head>\n'
        f"<body>{body}</body>\n</html>\n"
    )


def _figure(picture: str, width: int, title: str, lines: Iterable[str]) -> str:
    listed = "".join(f"<span>{text(_cut(line))}</span>" for line in lines)
    return f'<figure style="width: {width}px">{picture}<figcaption>{text(_cut(title))}{listed}</figcaption></figure>'


def _cut(value: object) -> str:
    plain = str(value)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."
