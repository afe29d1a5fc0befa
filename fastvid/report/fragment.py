"""HTML for notebooks: fragments with facts and small pictures that take their colours from the page around them.

A notebook's theme is not that of the browser, so text and lines inherit its colour and nothing has a background.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fastvid.report.markup import text
from fastvid.report.page import asset

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
