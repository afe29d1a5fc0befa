"""Draws the path of a clip, as docs/images/clip-path-light.svg and -dark.svg: `python -m tests.docs.clip_picture`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.datasets import REPOSITORY

IMAGES = REPOSITORY / "docs" / "images"


class Stage(NamedTuple):
    """One stage of a clip's path; `counter` names its seconds in the statistics."""

    name: str
    what: str
    counter: str = ""


# When or where it happens, and what.
LANES = (
    ("before anything is read", (
        Stage("order", "which sample: arithmetic on the position, nothing stored"),
        Stage("choose", "frames, crop and flip, from seed, epoch and position"),
    )),
    ("in decode threads or processes", (
        Stage("plan", "the fewest packets that decode these frames"),
        Stage("read", "only their bytes, each packet checked", "fetch"),
        Stage("decode", "only these packets; the decoder stays open", "decode"),
    )),
    ("on the batch's device", (
        Stage("finish", "crop to RGB, transforms, normalise", "finish"),
        Stage("batch", "video, label, key, ...; resumed by five values"),
    )),
)  # fmt: skip

THEMES = {
    "light": {"ink": "#1b1f24", "muted": "#5b6470", "box": "#f4f6f8", "edge": "#d5dae1", "mark": "#0b6e4f"},
    "dark": {"ink": "#e6e9ef", "muted": "#a3acb9", "box": "#2a2f3a", "edge": "#475062", "mark": "#4cc49a"},
}
WIDTH, ROW, BOX, LEFT, NAME = 620, 48, 38, 8, 100
HEAD = 30  # height of a lane's title


def svg(theme: str) -> str:
    """Return the picture in one theme; its background is transparent."""
    ink, muted, box, edge, mark = THEMES[theme].values()
    parts, y = [], 4
    for lane, stages in LANES:
        parts.append(f'<text x="{LEFT}" y="{y + 18}" fill="{muted}" font-size="14">{lane}</text>')
        y += HEAD
        for stage in stages:
            middle = y + BOX / 2 + 5.5
            place = f'x="{LEFT}" y="{y}" width="{WIDTH - 2 * LEFT}" height="{BOX}" rx="6"'
            parts.append(f'<rect {place} fill="{box}" stroke="{edge}"/>')
            parts.append(f'<text x="{LEFT + 14}" y="{middle}" fill="{ink}" font-weight="600">{stage.name}</text>')
            parts.append(f'<text x="{LEFT + NAME}" y="{middle}" fill="{ink}">{stage.what}</text>')
            if stage.counter:
                right = WIDTH - LEFT - 14
                parts.append(
                    f'<text x="{right}" y="{middle}" fill="{mark}" text-anchor="end" font-weight="600">'
                    f"{stage.counter}</text>"
                )
            y += ROW
    y += 2
    parts.append(
        f'<text x="{LEFT}" y="{y + 12}" fill="{muted}" font-size="14">Green: the stage as '
        "loader.stats.verdict() names it.</text>"
    )
    size = f'viewBox="0 0 {WIDTH} {y + 20}" width="{WIDTH}" height="{y + 20}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="16"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>", ""])


def files() -> dict[Path, str]:
    """Return the pictures by file."""
    return {IMAGES / f"clip-path-{theme}.svg": svg(theme) for theme in THEMES}


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text)
