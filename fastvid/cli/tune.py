"""``fastvid tune``: measure every profile on a sample of videos."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastvid.cli.command import forwards
from fastvid.errors import UsageError
from fastvid.runtime.values import json_text
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.tune.study import recommend, render, study


@forwards(study)
def tune(
    *sources: str,
    profiles: list[str] = tuple(PROFILES),  # type: ignore[assignment]
    need: float | None = None,
    keep: str | None = None,
    json: bool = False,
    **options: Any,
) -> int:
    """Measure every profile on a sample of your videos, and recommend one.

    Encodes the sample with each profile and measures size, encode time, quality and clips per second. The encoded
    samples are deleted unless --keep names a folder. Profiles are timed in turn, so other load on the machine affects
    all of them alike; ratios between profiles are more reliable than the numbers themselves.

    Args:
        sources (SOURCE): Folder of videos, or a video.
        profiles (PROFILE): Profiles to measure, of {PROFILES} (default: all).
        sampling (SAMPLING): Frames of a clip: tsnN or denseNxSTRIDE.
        need (N): Clips per second that training needs; recommend for it.
        videos (N): Videos in the sample.
        seed (N): Seed of the sample and its clips.
        rounds (N): Times to decode the clips.
        workers (N): Workers to encode and decode (default: one per core).
        keep (DIR): Keep the encoded samples here.
        follow_links: Accept links that point outside their folder.
        json: Print everything as one JSON object.
    """
    if not sources:
        raise UsageError("no source is given", hint="name a folder of videos, or a video")
    found = study(sources, profiles=profiles, folder=keep, **options)
    name, reasons = recommend(found, need)
    record = asdict(found) | {"recommended": name, "reasons": reasons}
    print(json_text(record, indent=1) if json else render(found, name, reasons))
    return 0
