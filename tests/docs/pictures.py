"""Draws docs/images/rooms-*.svg and clip-path-*.svg, each for light and dark pages: `python -m tests.docs.pictures`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.datasets import REPOSITORY

IMAGES = REPOSITORY / "docs" / "images"


class Box(NamedTuple):
    """One row of a picture; `counter` names the seconds of a stage in the statistics."""

    name: str
    what: str
    counter: str = ""


# When or where a stage of a clip's path happens, and what.
CLIP_PATH = (
    ("before anything is read", (
        Box("order", "which sample: arithmetic on the position, nothing stored"),
        Box("choose", "frames, crop and flip, from seed, epoch and position"),
    )),
    ("in decode threads or processes", (
        Box("plan", "the fewest packets that decode these frames"),
        Box("read", "only their bytes, each packet checked", "fetch"),
        Box("decode", "only these packets; the decoder stays open", "decode"),
    )),
    ("on the batch's device", (
        Box("finish", "crop to RGB, transforms, normalise", "finish"),
        Box("batch", "video, label, key, ...; resumed by a few numbers"),
    )),
)  # fmt: skip

# The rooms of the package, from those that import everything to those that import nothing.
ROOMS = (
    ("what people type", (
        Box("cli", "one file per command"),
        Box("demo", "a motion dataset, made, sharded, trained on"),
    )),
    ("training", (
        Box("train", "recipes, the loop, tasks, strategies, checkpoints, evaluation"),
        Box("models", "clips to logits; imports errors and runtime alone"),
    )),
    ("choosing a profile", (
        Box("tune", "every profile, timed on a sample of your videos"),
    )),
    ("loading", (
        Box("load", "order, frames and crops, workers, batches, transforms"),
    )),
    ("making datasets", (
        Box("sharding", "sources, encoding, jobs, changes, verification"),
        Box("videos", "one video as an object, datasets of them, notebooks"),
        Box("media", "what a foreign file is: probe, timing, limits"),
    )),
    ("from packets to frames", (
        Box("decode", "requests, back-ends, pixels, sound"),
    )),
    ("on disk", (
        Box("format", "packet tables, plans, bitstreams, tars, datasets"),
        Box("storage", "byte ranges and atomic writes, on disks and stores"),
    )),
    ("for all", (
        Box("report", "HTML pages, charts and pictures of commands"),
        Box("runtime", "cores, ranks, processes, arguments"),
        Box("errors", "every error that fastvid raises"),
    )),
)  # fmt: skip

THEMES = {
    "light": {"ink": "#1b1f24", "muted": "#5b6470", "box": "#f4f6f8", "edge": "#d5dae1", "mark": "#0b6e4f"},
    "dark": {"ink": "#e6e9ef", "muted": "#a3acb9", "box": "#2a2f3a", "edge": "#475062", "mark": "#4cc49a"},
}
WIDTH, LEFT, NAME = 620, 8, 108
HEAD = 30  # height of a lane's title


def svg(theme: str, lanes: tuple[tuple[str, tuple[Box, ...]], ...], note: str, height: int, gap: int) -> str:
    """Return a picture of lanes of boxes, `height` pixels high and `gap` pixels apart, on a transparent background."""
    ink, muted, box, edge, mark = THEMES[theme].values()
    parts, y = [], 4
    for lane, rows in lanes:
        parts.append(f'<text x="{LEFT}" y="{y + 18}" fill="{muted}" font-size="14">{lane}</text>')
        y += HEAD
        for row in rows:
            middle = y + height / 2 + 5.5
            place = f'x="{LEFT}" y="{y}" width="{WIDTH - 2 * LEFT}" height="{height}" rx="6"'
            parts.append(f'<rect {place} fill="{box}" stroke="{edge}"/>')
            parts.append(f'<text x="{LEFT + 14}" y="{middle}" fill="{ink}" font-weight="600">{row.name}</text>')
            parts.append(f'<text x="{LEFT + NAME}" y="{middle}" fill="{ink}">{row.what}</text>')
            if row.counter:
                right = WIDTH - LEFT - 14
                parts.append(
                    f'<text x="{right}" y="{middle}" fill="{mark}" text-anchor="end" font-weight="600">'
                    f"{row.counter}</text>"
                )
            y += height + gap
    y += 2
    parts.append(f'<text x="{LEFT}" y="{y + 12}" fill="{muted}" font-size="14">{note}</text>')
    size = f'viewBox="0 0 {WIDTH} {y + 20}" width="{WIDTH}" height="{y + 20}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="16"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>", ""])


def files() -> dict[Path, str]:
    """Return the pictures by file."""
    path = "Green: the stage as loader.stats.verdict() names it."
    rooms = "A room imports only from rooms below it."
    return {
        IMAGES / f"{name}-{theme}.svg": svg(theme, lanes, note, height, gap)
        for theme in THEMES
        for name, lanes, note, height, gap in (("clip-path", CLIP_PATH, path, 38, 10), ("rooms", ROOMS, rooms, 28, 5))
    }


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text)
