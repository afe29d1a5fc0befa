"""The demo's report: one HTML file without any reference to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastvid.report import page as html
from fastvid.report import plots


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
    numbers = [
        (percent(summary["tsm_top1"]), "held-out top-1 of TSM"),
        (percent(summary["control_top1"]), "of the same net without shift"),
        (percent(summary["shuffled_top1"]), "of TSM on shuffled frames"),
        (percent(summary["chance"]), "chance, eight directions"),
        (f"{summary['clips_per_second']:.0f}", "clips/s out of the loader"),
        (f"{summary['seconds']:.0f} s", "from raw videos to here"),
    ]
    sections = [
        html.figures(numbers),
        html.card(
            "Only a model that sees time can tell",
            html.side_by_side(
                plots.lines(curves, "held-out top-1, %", across="epochs", limits=(0, 103), whole_x=True),
                plots.lines(losses, "training loss", across="epochs", whole_x=True),
            ),
            "TSM shifts a quarter of its channels to the frame before and a quarter to the frame after. The control is"
            " the same net without the shift: it averages frames it sees one by one. That it can learn, but not"
            " motion, shows where the label is the kind of texture instead: there it reaches"
            f" {percent(summary['control_texture_top1'])}.",
        ),
        html.card(
            "Held-out clips",
            "".join(_strip(strip) for strip in strips),
            "The eight frames that the loader decoded, in order, cropped as the model saw them.",
        ),
        html.card(
            "Where a training step's time goes",
            plots.bars(
                {name: 1e3 * seconds for name, seconds in split.items()},
                unit="ms",
                marked=[name for name in split if name.startswith("wait")],
            ),
            f"One process of {summary['processes']}. Waiting is what the model stood still for; decoding runs beside"
            " it.",
        ),
        html.side_by_side(
            html.card(
                "Loader",
                html.table(("decoder", "encoding", "clips/s", "packets fed"), loaders),
                "Packets fed: planned, against those from each key frame on.",
            ),
            html.card("Dataset", html.table(("", ""), facts)),
        ),
    ]
    return html.page(
        "fastvid demo",
        "Raw videos, made with ffmpeg, were sharded, indexed, decoded by plan and learnt under torchrun with"
        f" {summary['processes']} processes. Textures drift in eight directions; no single frame tells which.",
        "\n".join(sections),
    )


def _strip(strip: Strip) -> str:
    row = np.concatenate(
        [np.pad(frame, ((0, 0), (0, 3), (0, 0)), constant_values=255) for frame in strip.frames], axis=1
    )
    says = "<br>".join(
        f'{html.text(model)} <span class="{"ok" if guess == strip.truth else "no"}">{html.text(guess)}</span>'
        for model, guess in strip.guesses.items()
    )
    shown = html.picture(row, f"eight frames of a clip that moves {strip.truth}")
    return f'<div class="clip">{shown}<div><b>{html.text(strip.truth)}</b><br>{says}</div></div>'
