"""The page of `fastvid tune --html`: its table, its plots and its advice, in one file without references."""

from __future__ import annotations

from fastvid.report.page import card, figures, page, side_by_side, table, text
from fastvid.report.plots import bars, lines
from fastvid.runtime.units import duration, things
from fastvid.tune.advice import Advice
from fastvid.tune.study import Study
from fastvid.tune.text import HEADS, rows


def render(study: Study, advice: Advice) -> bytes:
    """The page, UTF-8."""
    names = [one.profile for one in study.measured]
    hours = study.seconds / 3600
    points = {one.profile: [(one.bytes / hours / 1e9, one.clips_per_second)] for one in study.measured}
    speed = {one.profile: one.clips_per_second for one in study.measured}
    weight = {one.profile: one.bytes / hours / 1e9 for one in study.measured}
    loss = {one.profile: one.ssim for one in study.measured if one.ssim is not None}
    effort = {one.profile: one.encode_seconds / (study.seconds / 60) for one in study.measured}
    chosen = [name for name in names if name == advice.profile]
    body = figures(
        [
            (advice.profile, "recommended"),
            (str(study.videos), f"videos of {study.found}"),
            (duration(study.seconds), "of video"),
            (study.sampling, "frames of a clip"),
        ]
    )
    body += card("Why", "<ul>" + "".join(f"<li>{text(reason)}</li>" for reason in advice.reasons) + "</ul>")
    body += card("Numbers", table(HEADS, rows(study)))
    body += card(
        "Size and speed",
        lines(points, "clips a second", across="GB for an hour of video", size=(9.6, 4.2)),
        "Up is faster, left is smaller.",
    )
    body += card(
        "Clips a second",
        bars(speed, unit="", marked=chosen),
        f"{things(study.workers, 'worker')}, planned packets to YUV planes, from memory.",
    )
    body += side_by_side(
        card("Size", bars(weight, unit="GB/h", marked=chosen, width=4.7)),
        card("Encoding", bars(effort, unit="CPU s/min", marked=chosen, width=4.7)),
    )
    if loss:
        body += card("SSIM", bars(loss, unit="", marked=chosen), "Against the source, scaled as the profile scales it.")
    lead = f"{things(study.videos, 'video')} in each profile, drawn with seed {study.seed}"
    return page("Which profile", lead, body).encode()
