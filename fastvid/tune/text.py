"""Render a study as a plain-text table."""

from __future__ import annotations

from typing import Final

from fastvid.runtime.values import count, duration, size, things
from fastvid.tune.study import Advice, Study

HEADS: Final = (
    "profile",
    "size",
    "an hour",
    "encode CPU s/min",
    "SSIM",
    "PSNR dB",
    "clips/s",
    "CPU ms/clip",
    "packets",
)


def rows(study: Study) -> list[list[str]]:
    """Return one row per profile, with the columns of HEADS."""
    minutes = study.seconds / 60
    return [
        [
            one.profile,
            size(one.bytes),
            size(one.bytes / minutes * 60),
            f"{one.encode_seconds / minutes:.1f}",
            "-" if one.ssim is None else f"{one.ssim:.4f}",
            "-" if one.psnr is None else f"{one.psnr:.2f}",
            f"{one.clips_per_second:.0f}",
            f"{one.cpu_ms:.2f}",
            f"{one.packets:.1f} of {one.packets_from_keys:.1f}",
        ]
        for one in study.measured
    ]


def sentences(study: Study) -> list[tuple[str, str]]:
    """Return for each profile what all videos that were found would take."""
    return [(one.profile, one.estimate.sentence()) for one in study.measured if one.estimate is not None]


def render(study: Study, advice: Advice) -> str:
    """Render the study and the advice for a terminal."""
    body = [list(HEADS), *rows(study)]
    widths = [max(len(row[column]) for row in body) for column in range(len(HEADS))]
    lines = [
        f"{things(study.videos, 'video')} of {count(study.found)}, {duration(study.seconds)},"
        f" {size(study.source_bytes)} of sources; clips {study.sampling}, {things(study.workers, 'worker')}",
        "",
    ]
    for row in body:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    lines += ["", *(f"{name}: {sentence}" for name, sentence in sentences(study))]
    for one in study.measured:
        if one.rejected:
            what = ", ".join(f"{number} {reason}" for reason, number in one.rejected.items())
            lines.append(f"{one.profile} rejects {what}")
    lines += [f"{name} was not measured: {why}" for name, why in study.refused.items()]
    lines += ["", f"recommended: {advice.profile}", *(f"  {reason}" for reason in advice.reasons)]
    return "\n".join(lines)
