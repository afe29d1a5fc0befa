"""Which profile to take, and why in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastvid.errors import UsageError
from fastvid.runtime.units import size
from fastvid.tune.study import Measured, Study

# A loss of SSIM that people see side by side, and that cannot be made up for by speed.
_MOST_LOSS: Final = 0.03


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        profile: The profile to take.
        reasons: Why, a sentence each.
    """

    profile: str
    reasons: tuple[str, ...]


def recommend(study: Study, need: float | None = None) -> Advice:
    """Chooses a profile.

    With a need, the smallest profile that is fast enough; without one, the profile whose bytes times decode time is
    lowest: twice the speed is worth twice the bytes, and no more. Profiles that lose far more than the best are out.

    Args:
        study: What was measured.
        need: Clips a second that the workers must decode.

    Raises:
        UsageError: Nothing was measured.
    """
    if not study.measured:
        raise UsageError("no profile was measured", hint="; ".join(study.refused.values()) or None)
    best = max((one.ssim for one in study.measured if one.ssim is not None), default=1.0)
    good = [one for one in study.measured if one.ssim is None or one.ssim >= best - _MOST_LOSS]
    reasons = []
    if need is not None:
        enough = [one for one in good if one.clips_per_second >= need]
        chosen = min(enough, key=lambda one: one.bytes) if enough else max(good, key=lambda one: one.clips_per_second)
        reasons.append(
            f"{chosen.profile} is the smallest that decodes {need:g} clips a second here"
            if enough
            else f"no profile decodes {need:g} clips a second here; {chosen.profile} comes nearest"
        )
    else:
        chosen = min(good, key=_cost)
        reasons.append(
            f"{chosen.profile} has the lowest product of size and decode time: each profile that is faster is larger by"
            " more than it is faster, each that is smaller is slower by more than it is smaller"
        )
    reasons += [_against(chosen, other, study) for other in study.measured if other is not chosen]
    return Advice(chosen.profile, tuple(reasons))


def _cost(one: Measured) -> float:
    return one.bytes * one.cpu_ms


def _against(chosen: Measured, other: Measured, study: Study) -> str:
    speed, weight = chosen.cpu_ms / other.cpu_ms, other.bytes / chosen.bytes
    words = f"{other.profile}: {speed:.2f} times the clips a second, {weight:.2f} times the bytes"
    words += f" ({size(3600 * other.bytes / study.seconds)} an hour)"
    if other.ssim is not None and chosen.ssim is not None:
        words += f", SSIM {other.ssim - chosen.ssim:+.3f}"
    elif other.ssim is None:
        words += ", nothing lost, and sizes, rates and colours as they are"
    return words
