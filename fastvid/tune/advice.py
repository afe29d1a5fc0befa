"""Recommend a profile, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastvid.errors import UsageError
from fastvid.runtime.units import size
from fastvid.tune.study import ProfileResult, Study

# An SSIM loss that is visible side by side; speed does not make up for it.
_MAX_SSIM_LOSS: Final = 0.03


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        profile: The recommended profile.
        reasons: The reasons, one sentence each.
    """

    profile: str
    reasons: tuple[str, ...]


def recommend(study: Study, need: float | None = None) -> Advice:
    """Choose a profile.

    With a need, this is the smallest profile that is fast enough; without one, the profile with the lowest product of
    bytes and decode time: twice the speed is worth at most twice the bytes. Profiles whose SSIM is more than 0.03 below
    the best are excluded.

    Args:
        study: The measurements.
        need: Clips per second that the workers must decode.

    Raises:
        UsageError: If nothing was measured.
    """
    if not study.measured:
        raise UsageError("no profile was measured", hint="; ".join(study.refused.values()) or None)
    best = max((one.ssim for one in study.measured if one.ssim is not None), default=1.0)
    good = [one for one in study.measured if one.ssim is None or one.ssim >= best - _MAX_SSIM_LOSS]
    reasons = []
    if need is not None:
        enough = [one for one in good if one.clips_per_second >= need]
        chosen = min(enough, key=lambda one: one.bytes) if enough else max(good, key=lambda one: one.clips_per_second)
        reasons.append(
            f"{chosen.profile} is the smallest profile that decodes {need:g} clips per second here"
            if enough
            else f"no profile decodes {need:g} clips per second here; {chosen.profile} is the fastest"
        )
    else:
        chosen = min(good, key=_cost)
        reasons.append(
            f"{chosen.profile} has the lowest product of size and decode time: each faster profile is larger by a"
            " greater factor than it is faster, each smaller one is slower by a greater factor than it is smaller"
        )
    reasons += [_compare(chosen, other, study) for other in study.measured if other is not chosen]
    return Advice(chosen.profile, tuple(reasons))


def _cost(one: ProfileResult) -> float:
    return one.bytes * one.cpu_ms


def _compare(chosen: ProfileResult, other: ProfileResult, study: Study) -> str:
    speed, weight = chosen.cpu_ms / other.cpu_ms, other.bytes / chosen.bytes
    words = f"{other.profile}: {speed:.2f} times the clips per second, {weight:.2f} times the bytes"
    words += f" ({size(3600 * other.bytes / study.seconds)} per hour)"
    if other.ssim is not None and chosen.ssim is not None:
        words += f", SSIM {other.ssim - chosen.ssim:+.3f}"
    elif other.ssim is None:
        words += ", lossless: sizes, frame rates and colours are unchanged"
    return words
