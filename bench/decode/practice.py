"""Compare planned decoding with today's practice: videos as they usually are, and DALI on whole videos.

today's practice      the same frames of the same videos at equal SSIM: rivals on x264's defaults, fastvid on its
                      profiles
sliced against whole  DALI on the packets that fastvid plans, in a minimal MP4, against DALI on whole videos
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.common.footage import shard
from bench.decode.contest import at_their_best, entry
from bench.decode.encodings import DEFAULT, videos
from bench.decode.goals import best_rival
from fastvid.tune.measure import Contender, Corpus, RoundTimes, fastvid, measure, ratio

TODAY: Final = "today's practice"
SLICED: Final = "sliced against whole"
PLANNED, WHOLE = "dali-cpu", "dali-whole"

# Encodings that DALI decodes on a CPU: name, profile, options of `fastvid shard`.
_DALI: Final = (("vp9", "vp9", ()), ("vp9-intra", "vp9", ("--gop", "1")), ("mjpeg", "mjpeg", ()))
_SAMPLING: Final = "tsn8"


def today(corpora: Mapping[str, Corpus], rivals: Sequence[Contender], workers: int, rounds: int) -> dict[str, Any]:
    """Time rivals on x264's defaults and fastvid on every encoding, in alternating rounds."""
    ours = []
    for name, corpus in corpora.items():
        for product in ("rgb", "planes"):
            job = fastvid(corpus, workers, product=product, source="memory")
            ours.append(replace(job, settings={"encoding": name, "product": product}))
    theirs = [replace(one, settings={"encoding": DEFAULT, **one.settings}) for one in rivals]
    clips = len(corpora[DEFAULT].requests)
    timings = measure([*ours, *theirs], clips, rounds)
    megabytes = {name: round(sum(map(len, corpus.mp4s)) / 1e6, 2) for name, corpus in corpora.items()}
    named = {
        f"{one.settings['product']} of {one.settings['encoding']}": timing
        for one, timing in zip(ours, timings, strict=False)
    }
    return {
        "question": TODAY,
        "sampling": corpora[DEFAULT].sampling,
        "clips": clips,
        "megabytes": megabytes,
        "contenders": [entry(one, timing) for one, timing in zip(ours, timings, strict=False)]
        + _rival_entries(theirs, timings[len(ours) :], named),
    }


def sliced(
    footage: Path, count: int, cache: Path, workers: int, rounds: int, sweep_rounds: int
) -> Iterator[dict[str, Any]]:
    """Time DALI on planned packets and on whole videos, in alternating rounds; yields one row per encoding."""
    files = list(videos(footage).values())
    few = cache / f"{count}-videos"
    few.mkdir(parents=True, exist_ok=True)
    for file in files[:: max(1, len(files) // count)][:count]:
        if not (few / file.name).exists():
            shutil.copyfile(file, few / file.name)
    for name, profile, options in _DALI:
        corpus = Corpus(str(shard(few, profile, cache, options=options, name=f"{few.name}-{name}")), _SAMPLING)
        found = at_their_best((PLANNED, WHOLE), corpus, workers, sweep_rounds)
        row: dict[str, Any] = {
            "question": SLICED,
            "encoding": name,
            "sampling": _SAMPLING,
            "clips": len(corpus.requests),
            "megabytes": {name: round(sum(map(len, corpus.mp4s)) / 1e6, 2)},
            "packets_a_clip": corpus.mean_packets(),
            "sweeps": found.sweeps,
            "refused": found.refused,
            "contenders": [],
        }
        if len(found.best) == 2:
            planned, whole = measure(found.best, len(corpus.requests), rounds)
            row["contenders"] = [
                entry(found.best[0], planned),
                *_rival_entries(found.best[1:], [whole], {"dali-cpu on planned packets": planned}),
            ]
        yield row


def _rival_entries(
    rivals: Sequence[Contender], timings: Sequence[RoundTimes], ours: Mapping[str, RoundTimes]
) -> list[dict[str, Any]]:
    return [
        entry(one, timing) | {"fastvid_is_faster_by": {name: ratio(own, timing) for name, own in ours.items()}}
        for one, timing in zip(rivals, timings, strict=True)
    ]


def table(row: Mapping[str, Any]) -> str:
    """Format a row as a text table."""
    sizes = ", ".join(f"{name} {size}" for name, size in row["megabytes"].items())
    lines = [f"{title(row)}: {row['clips']} clips; MB: {sizes}"]
    for one in row["contenders"]:
        spread = f"{one['rate_min']:.0f}..{one['rate_max']:.0f}"
        lines.append(f"  {one['label']:70} {one['rate']:8.1f} {spread:>13} {one['cpu_ms']:7.2f}")
    best = best_rival(row)
    if best is not None:
        lines += [
            f"      {ours:30} {times['wall']:.2f}x   by CPU time {times['cpu']:.2f}x   against {best['name']}"
            for ours, times in best["fastvid_is_faster_by"].items()
        ]
    lines += [f"  {name} cannot run here: {why}" for name, why in row.get("refused", {}).items()]
    return "\n".join(lines)


def title(row: Mapping[str, Any]) -> str:
    """Return the title of a row."""
    return ", ".join([row["question"], *([row["encoding"]] if "encoding" in row else []), row["sampling"]])
