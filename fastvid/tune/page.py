"""The HTML page of `fastvid tune --html`: the advice, the numbers and their charts."""

from __future__ import annotations

from fastvid.report.charts import bars, lines
from fastvid.report.page import Section, bullets, card, document, figures, grid, table
from fastvid.runtime.values import count, duration, size, things
from fastvid.tune.study import Advice, Study
from fastvid.tune.text import HEADS, rows, sentences


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
        ("Clips per second", f"{best.clips_per_second:,.0f}", f"with {things(study.workers, 'worker')}"),
        ("One hour of video", size(weight[advice.profile]), f"{size(study.source_bytes / hours)} in the sources"),
        ("Sample", duration(study.seconds), f"{things(study.videos, 'video')} of {count(study.found)}"),
    ]
    charts = [
        card(
            "Clips per second",
            bars(speed, quiet=quiet),
            f"{things(study.workers, 'worker')}, planned packets in memory to YUV planes.",
        ),
        card("One hour of video", bars(weight, label=size, quiet=quiet), "Size of all samples over their duration."),
        card("Encoding", bars(effort, label=lambda took: f"{duration(took)} CPU", quiet=quiet), "Per minute of video."),
    ]
    if quality:
        note = "Compared with the source scaled like the profile; 1 means equal."
        charts.append(card("SSIM", bars(quality, label="{:.4f}".format, quiet=quiet), note))
    scatter = lines(points, "clips per second", across="GB for one hour of video")
    refused = [f"{name} is not measured: {why}" for name, why in study.refused.items()]
    return document(
        f"{advice.profile} is recommended",
        [
            Section("Why", card("Compared with it", bullets([*advice.reasons[1:], *refused])), advice.reasons[0] + "."),
            Section(
                "Numbers",
                card("Profiles", table(HEADS, rows(study), marked={advice.profile}))
                + card("All of them", bullets([f"{name}: {sentence}" for name, sentence in sentences(study)])),
            ),
            Section(
                "Charts",
                card("Size and speed", scatter, "Up is faster, left is smaller.") + grid(*charts),
            ),
        ],
        command="tune",
        lead=f"{things(study.videos, 'video')} encoded with each profile, measured and compared.",
        chips={"clips": study.sampling, "workers": study.workers, "seed": study.seed},
        top=figures(numbers),
    )
