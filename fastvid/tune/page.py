"""The page of `fastvid tune --html`: the advice, the numbers and their charts."""

from __future__ import annotations

from fastvid.report.charts import bars, lines
from fastvid.report.markup import bullets, card, figures, grid, table
from fastvid.report.page import Section, document
from fastvid.runtime.units import count, duration, size, things
from fastvid.tune.advice import Advice
from fastvid.tune.study import Study
from fastvid.tune.text import HEADS, rows


def render(study: Study, advice: Advice) -> str:
    """Return the page."""
    hours = study.seconds / 3600
    measured = {one.profile: one for one in study.measured}
    quiet = [name for name in measured if name != advice.profile]
    speed = {name: one.clips_per_second for name, one in measured.items()}
    weight = {name: one.bytes / hours for name, one in measured.items()}
    points = {name: [(weight[name] / 1e9, speed[name])] for name in measured}
    effort = {name: one.encode_seconds / (60 * hours) for name, one in measured.items()}
    quality = {name: one.ssim for name, one in measured.items() if one.ssim is not None}
    best = measured[advice.profile]
    numbers = [
        ("Recommended", advice.profile, f"of {things(len(measured), 'profile')}"),
        ("Clips a second", f"{best.clips_per_second:,.0f}", f"with {things(study.workers, 'worker')}"),
        ("An hour of video", size(weight[advice.profile]), f"{size(study.source_bytes / hours)} as it is"),
        ("Sample", duration(study.seconds), f"{things(study.videos, 'video')} of {count(study.found)}"),
    ]
    charts = [
        card(
            "Clips a second",
            bars(speed, quiet=quiet),
            f"{things(study.workers, 'worker')}, planned packets to YUV planes, from memory.",
        ),
        card("An hour of video", bars(weight, label=size, quiet=quiet), "Bytes of all samples over their length."),
        card("Encoding", bars(effort, label=lambda took: f"{duration(took)} CPU", quiet=quiet), "A minute of video."),
    ]
    if quality:
        note = "Against the source, scaled as the profile scales it; 1 is equal."
        charts.append(card("SSIM", bars(quality, label="{:.4f}".format, quiet=quiet), note))
    scatter = lines(points, "clips a second", across="GB for an hour of video")
    refused = [f"{name} is not measured: {why}" for name, why in study.refused.items()]
    return document(
        f"{advice.profile} is recommended",
        [
            Section("Why", card("Compared with it", bullets([*advice.reasons[1:], *refused])), advice.reasons[0] + "."),
            Section("Numbers", card("Profiles", table(HEADS, rows(study), marked={advice.profile}))),
            Section(
                "Charts",
                card("Size and speed", scatter, "Up is faster, left is smaller.") + grid(*charts),
            ),
        ],
        command="tune",
        lead=f"{things(study.videos, 'video')} encoded in each profile, measured and compared.",
        chips={"clips": study.sampling, "workers": study.workers, "seed": study.seed},
        top=figures(numbers),
    )
