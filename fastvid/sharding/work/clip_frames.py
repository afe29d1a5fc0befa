"""Which frames of its source a clip consists of."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from fastvid.errors import SourceError
from fastvid.media.probe import SourceInfo
from fastvid.media.reasons import Reason
from fastvid.media.timing import FrameTiming


def plan_parts(
    timing: FrameTiming, start: float | None, end: float | None, max_seconds: float
) -> list[tuple[int, int] | None]:
    """The frames of each sample of a source, as half-open ranges at the written rate; None for all frames.

    A long video is split into the fewest parts of equal length that keep the bound.
    """
    total, rate = timing.frames, timing.rate
    first = 0 if start is None else max(0, round(Fraction(start) * rate))
    # Annotated ends are rounded to seconds and may lie behind the last frame.
    last = total if end is None else min(total, round(Fraction(end) * rate))
    if first >= last:
        raise SourceError(
            f"the clip {start} s to {end} s is not in {float(total / rate):.2f} s of video", reason=Reason.OUT_OF_RANGE
        )
    most = max(1, int(Fraction(max_seconds) * rate))
    count = -(-(last - first) // most)
    if count == 1:
        return [None] if (first, last) == (0, total) else [(first, last)]
    cuts = [first + (last - first) * number // count for number in range(count + 1)]
    return list(pairwise(cuts))


def numbered_part(info: SourceInfo, timing: FrameTiming, first: int, count: int) -> tuple[int, int] | None:
    """Return frames that are given by their numbers in the source, as `plan_parts` does."""
    if info.timing.input_rate is None or timing.rate != info.timing.input_rate:
        raise SourceError(
            f"frames cannot be numbered at a {info.timing.kind} rate that is written as {float(timing.rate):g} per"
            " second",
            reason=Reason.OUT_OF_RANGE,
        )
    if first + count > timing.frames:
        raise SourceError(
            f"frames {first} to {first + count} are not in a video of {timing.frames}", reason=Reason.OUT_OF_RANGE
        )
    return None if (first, count) == (0, timing.frames) else (first, first + count)
