"""The demo's report: one HTML file without any reference to another."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import MaxNLocator

INK: Final = "#1b1f24"
MUTED: Final = "#68707c"
COLOURS: Final = {"tsm": "#0b6e4f", "control": "#c8553d", "texture": "#3d6fb4", "grey": "#b8bfc9"}

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


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """One held-out clip and what the models said of it.

    Attributes:
        frames: uint8 [T, H, W, 3].
        truth: The right class.
        guesses: Class by model name.
    """

    frames: npt.NDArray[np.uint8]
    truth: str
    guesses: Mapping[str, str]


def page(
    summary: Mapping[str, Any],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    losses: Mapping[str, Sequence[tuple[float, float]]],
    strips: Sequence[Strip],
    split: Mapping[str, float],
    facts: Sequence[tuple[str, str]],
    loaders: Sequence[tuple[str, str, str, str]],
) -> str:
    """The whole page.

    Args:
        summary: The demo's summary, as written to summary.json.
        curves: Held-out top-1 in percent over epochs, by run.
        losses: Training loss over epochs, by run.
        strips: Held-out clips with predictions.
        split: Seconds of a training step by part.
        facts: Rows about the dataset.
        loaders: Rows of the loader's timing: decoder, encoding, clips a second, packets fed.
    """
    percent = "{:.1f} %".format
    figures = [
        (percent(summary["tsm_top1"]), "held-out top-1 of TSM"),
        (percent(summary["control_top1"]), "of the same net without shift"),
        (percent(summary["shuffled_top1"]), "of TSM on shuffled frames"),
        (percent(summary["chance"]), "chance, eight directions"),
        (f"{summary['clips_per_second']:.0f}", "clips/s out of the loader"),
        (f"{summary['seconds']:.0f} s", "from raw videos to here"),
    ]
    cards = "".join(f'<div class="figure"><b>{value}</b><span>{label}</span></div>' for value, label in figures)
    texture = percent(summary["control_texture_top1"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fastvid demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body><main>
<h1>fastvid demo</h1>
<p class="muted">Raw videos, made with ffmpeg, were sharded, indexed, decoded by plan and learnt under torchrun with
{summary["processes"]} processes. Textures drift in eight directions; no single frame tells which.</p>
<div class="figures">{cards}</div>
<div class="card"><h2>Only a model that sees time can tell</h2>
<p>TSM shifts a quarter of its channels to the frame before and a quarter to the frame after. The control is the same
net without the shift: it averages frames it sees one by one. That it can learn, but not motion, shows where the label
is the kind of texture instead: there it reaches {texture}.</p>
<div class="two">{_lines(curves, "held-out top-1, %", limits=(0, 103))}{_lines(losses, "training loss")}</div></div>
<div class="card"><h2>Held-out clips</h2>
<p>The eight frames that the loader decoded, in order, cropped as the model saw them.</p>
{"".join(_strip(strip) for strip in strips)}</div>
<div class="card"><h2>Where a training step's time goes</h2>
<p>One process of {summary["processes"]}. Waiting is what the model stood still for; decoding runs beside it.</p>
{_bars(split)}</div>
<div class="two"><div class="card"><h2>Loader</h2>{_table(("decoder", "encoding", "clips/s", "packets fed"), loaders)}
<p class="muted" style="margin-top:12px">Packets fed: planned, against those from each key
frame on.</p></div>
<div class="card"><h2>Dataset</h2>{_table(("", ""), facts)}</div></div>
</main></body></html>
"""


def _strip(strip: Strip) -> str:
    row = np.concatenate(
        [np.pad(frame, ((0, 0), (0, 3), (0, 0)), constant_values=255) for frame in strip.frames], axis=1
    )
    says = "<br>".join(
        f'{html.escape(model)} <span class="{"ok" if guess == strip.truth else "no"}">{html.escape(guess)}</span>'
        for model, guess in strip.guesses.items()
    )
    picture = f'<img alt="eight frames of a clip that moves {html.escape(strip.truth)}" src="{_png(row)}">'
    return f'<div class="clip">{picture}<div><b>{html.escape(strip.truth)}</b><br>{says}</div></div>'


def _png(pixels: npt.NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    imsave(out, pixels, format="png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{' class=n' if i else ''}>{html.escape(h)}</th>" for i, h in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if i else ''}>{html.escape(c)}</td>" for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if any(heads) else ''}{body}</table>"


def _lines(
    series: Mapping[str, Sequence[tuple[float, float]]], title: str, limits: tuple[float, float] | None = None
) -> str:
    figure, axes = _axes(4.7, 3.0)
    for name, points in series.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=COLOURS[name.split()[0].strip(",").lower()], linewidth=2, label=name)
    if limits:
        axes.set_ylim(*limits)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epochs")
    axes.set_title(title, loc="left", fontsize=10.5, color=MUTED)
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def _bars(split: Mapping[str, float]) -> str:
    figure, axes = _axes(9.6, 0.42 * len(split) + 0.6)
    names, values = list(split), [1e3 * value for value in split.values()]
    bars = axes.barh(
        names, values, color=[COLOURS["control"] if n.startswith("wait") else COLOURS["tsm"] for n in names]
    )
    axes.bar_label(bars, fmt="%.1f ms", padding=4, fontsize=9.5, color=INK)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xlim(right=max(values) * 1.12)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    return _svg(figure)


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    # Figure without pyplot: no global state, no display.
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9.5, colors=INK, length=0)
    axes.grid(axis="y", color="#eceff3")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastvid", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]
