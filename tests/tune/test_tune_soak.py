"""The results of `fastvid tune` on some videos hold for others. Run by ``make soak``; results in tune.json."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
from bench.decode import decode
from bench.decode.contest import Rivals
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from fastvid.tune.measure import Corpus
from fastvid.tune.study import recommend, render, study

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

# Copies vary as much as their sources, so some videos do not predict others; recorded, but not asserted.
ENCODING = [name for name, profile in PROFILES.items() if not profile.copies]
MOST_OFF = 0.15
VIDEOS = int(os.environ.get("FASTVID_SOAK_VIDEOS", "24"))


def test_measured_ratios_hold_on_other_videos(footage, tmp_path):
    place = Path(os.environ.get("FASTVID_SOAK_DIR", tmp_path))
    # Alternate files, so that both halves contain videos of every set of the footage.
    files = sorted(path for path in (footage / "clean").iterdir() if path.suffix != ".mpg")
    seen, unseen = files[::2][:VIDEOS], files[1::2][:VIDEOS]
    found = study([str(path) for path in seen], videos=len(seen), workers=1, rounds=7)
    predicted = {one.profile: one.cpu_ms for one in found.measured}
    measured = {}
    for name in predicted:
        out = place / f"tune-{name}"
        run_job([str(path) for path in unseen], str(out), profile=name, workers=1)
        # Videos smaller than the bench's crop are enlarged by all profiles but copy.
        if name in ENCODING:
            row = decode.compare(Corpus(str(out), "tsn8"), Rivals(), 1, 7)
            (entry,) = [
                one for one in row["contenders"] if one["settings"] == {"product": "planes", "source": "memory"}
            ]
            measured[name] = entry["cpu_ms"]
    ratios = {
        name: {
            "predicted": predicted["compact"] / predicted[name],
            "measured": measured["compact"] / measured[name],
            "off": predicted["compact"] / predicted[name] / (measured["compact"] / measured[name]) - 1,
        }
        for name in measured
    }
    name, reasons = recommend(found)
    record = {
        "schema": "fastvid-tune/1",
        "machine": machine_facts(),
        "study": found.to_json(),
        "recommended": name,
        "reasons": reasons,
        "seen": [path.name for path in seen],
        "unseen": [path.name for path in unseen],
        "clips_a_second_against_compact_by_cpu_time": ratios,
    }
    write_json(RESULTS / "tune.json", record)
    print(render(found, name, reasons))
    worst = max(ratios.items(), key=lambda item: abs(item[1]["off"]))
    assert set(measured) == set(ENCODING)
    assert np.abs([one["off"] for one in ratios.values()]).max() <= MOST_OFF, worst
