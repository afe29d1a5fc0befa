"""The frame that all reports share: style, cards, tables, pictures. Text is escaped here."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from matplotlib.image import imsave

_STYLE: Final = """
:root { color-scheme: light; }
body {
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1b1f24; background: #f6f7f9;
  margin: 0;
}
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 0 0 4px; }
p { margin: 4px 0 14px; max-width: 72ch; }
.muted { color: #68707c; }
.card { background: #fff; border: 1px solid #e3e6eb; border-radius: 10px; padding: 22px 24px; margin: 20px 0; }
.card .wide { overflow-x: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 14px; margin: 24px 0; }
.figure { background: #fff; border: 1px solid #e3e6eb; border-radius: 10px; padding: 14px 16px; }
.figure b { display: block; font-size: 27px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.figure span { color: #68707c; font-size: 13.5px; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; }
@media (max-width: 760px) { .two { grid-template-columns: 1fr; } }
table { border-collapse: collapse; font-size: 14.5px; width: 100%; }
td, th { text-align: left; padding: 5px 12px 5px 0; }
th { color: #68707c; font-weight: 500; border-bottom: 1px solid #e3e6eb; }
td { border-bottom: 1px solid #f0f2f5; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, td.n { white-space: nowrap; }
svg { max-width: 100%; height: auto; display: block; }
.clip {
  display: grid; grid-template-columns: 1fr 240px; gap: 18px; align-items: center; padding: 9px 0;
  border-bottom: 1px solid #f0f2f5;
}
.clip img { width: 100%; image-rendering: auto; border-radius: 4px; display: block; }
.ok { color: #0b6e4f; font-weight: 600; }
.no { color: #c8553d; font-weight: 600; }
code { background: #eef0f3; padding: 1px 5px; border-radius: 4px; font-size: 14px; }
"""


def text(value: object) -> str:
    """`value` as it may stand between tags or in a quoted attribute."""
    return html.escape(str(value))


def page(title: str, lead: str, body: str) -> str:
    """The whole file.

    Args:
        title: Plain text, heading and name of the page.
        lead: Plain text below it.
        body: HTML.
    """
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body><main>
<h1>{text(title)}</h1>
<p class="muted">{text(lead)}</p>
{body}
</main></body></html>
"""


def figures(numbers: Sequence[tuple[str, str]]) -> str:
    """A row of large numbers, each with what it is, both plain text."""
    cards = "".join(
        f'<div class="figure"><b>{text(value)}</b><span>{text(label)}</span></div>' for value, label in numbers
    )
    return f'<div class="figures">{cards}</div>'


def card(title: str, body: str, note: str = "") -> str:
    """A box: plain title, plain note below it, HTML body."""
    return f'<div class="card"><h2>{text(title)}</h2>{f"<p>{text(note)}</p>" if note else ""}{body}</div>'


def side_by_side(left: str, right: str) -> str:
    """Two pieces of HTML in one row, below each other on a narrow screen."""
    return f'<div class="two">{left}{right}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text in rows; all columns but the first are aligned as numbers. Heads that are all empty are left out."""
    head = "".join(f"<th{' class=n' if i else ''}>{text(h)}</th>" for i, h in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if i else ''}>{text(c)}</td>" for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if any(heads) else ""}{body}</table></div>'


def picture(pixels: npt.NDArray[np.uint8], alt: str) -> str:
    """An image of uint8 [H, W, 3] inside the page."""
    out = io.BytesIO()
    imsave(out, pixels, format="png")
    return f'<img alt="{text(alt)}" src="data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}">'
