"""Assembles the HTML file from sections, with a policy that forbids external content.

All data from outside fastvid goes through `markup.text`. The policy forbids the network and every script except the one
whose hash it contains, so that a hostile name could do nothing even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import fastvid
from fastvid.report.markup import text

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
