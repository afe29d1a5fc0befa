"""The HTML report of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.report.charts import bars, lines
from fastvid.report.markup import card, definitions, figures, film_strip, grid, picture, table, text
from fastvid.report.page import Section, document
from fastvid.runtime.units import duration, things

_STYLE: Final = """
.clip {
  display: grid; grid-template-columns: minmax(0, 1fr) 260px; gap: 8px 20px; align-items: center; padding: 10px 0;
  border-top: 1px solid var(--line);
}
.clip:first-of-type { border-top: 0; }
.clip img { width: 100%; display: block; border-radius: 6px; }
.clip div { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: center; } .clip b { width: 100%; }
@media (max-width: 700px) { .clip { grid-template-columns: minmax(0, 1fr); } }
"""


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """One held-out clip with the models' predictions."""

    frames: npt.NDArray[np.uint8]  # uint8 [T, H, W, 3]
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
    """Return the whole page.

    `split`: seconds of a training step by part. `facts`: rows about the dataset. `loaders`: rows of the loader's
    timing: decoder, encoding, clips per second, packets fed.
    """
    percent = "{:.1f} %".format
    numbers = [
        ("TSM", percent(summary["tsm_top1"]), "held-out top-1"),
        ("The same net without shift", percent(summary["control_top1"]), "held-out top-1"),
        ("TSM on shuffled frames", percent(summary["shuffled_top1"]), f"chance is {percent(summary['chance'])}"),
        ("Loader", f"{summary['clips_per_second']:,.0f} clips/s", "without a model"),
        ("Whole demo", duration(summary["seconds"]), "from raw videos to this page"),
    ]
    waiting = [name for name in split if name != "compute"]
    sections = [
        Section(
            "Learning",
            grid(
                card("", lines(curves, "held-out top-1, %", across="epochs", limits=(0, 103), whole_x=True)),
                card("", lines(losses, "training loss", across="epochs", whole_x=True)),
            ),
            "Only a model that compares frames can tell the classes apart. TSM shifts a quarter of its channels to the"
            " frame before and a quarter to the frame after. The control is the same net without the shift: it averages"
            " its predictions for single frames. If the label is the kind of texture instead, which needs no motion,"
            f" the control reaches {percent(summary['control_texture_top1'])}.",
        ),
        Section(
            "Clips",
            card("Held-out clips", "".join(map(_strip, strips))),
            "The eight frames that the loader decoded, in order, cropped as the model saw them.",
        ),
        Section(
            "Speed",
            card(
                "Where a training step's time goes",
                bars({name: 1e3 * seconds for name, seconds in split.items()}, unit="ms", quiet=waiting),
                f"One rank of {summary['processes']}. The model is idle during waits; decoding runs in parallel.",
            )
            + grid(
                card(
                    "Loader",
                    table(("decoder", "encoding", "clips/s", "packets fed"), loaders),
                    "Packets fed: with a plan, compared with all packets from each key frame on.",
                ),
                card("Dataset", definitions(dict(facts))),
            ),
        ),
    ]
    return document(
        "A model that sees motion",
        sections,
        command="demo",
        lead="Raw videos, made with ffmpeg, were sharded, indexed, decoded by plan and used for training with"
        f" {things(summary['processes'], 'rank')} of torchrun. Textures drift in eight directions; no single frame"
        " shows which.",
        top=figures(numbers),
        style=_STYLE,
    )


def _strip(strip: Strip) -> str:
    said = "".join(
        f'<span class="pill {"ok" if guess == strip.truth else "no"}">{text(model)}: {text(guess)}</span>'
        for model, guess in strip.guesses.items()
    )
    shown = picture(film_strip(strip.frames), f"eight frames of a clip that moves {strip.truth}")
    return f'<div class="clip">{shown}<div><b>{text(strip.truth)}</b>{said}</div></div>'
