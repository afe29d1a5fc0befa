"""`bench resume` counts what is lost and doubled after a kill: nothing by fastvid and torch, all by a wrong loader."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.load import load, resume, resume_programs
from bench.load.resume import SAVED, epoch_of, judged, measured
from bench.load.resume_programs import BATCH, LOADERS, SAMPLES, STEPS

WRONG = """
import os, sys
sys.path.insert(0, {folder!r})
from resume_programs import Skipping, main

class Wrong(Skipping, name="wrong", package="torch"):
    def load(self, folder, epoch):
        if self.world == 1:
            raise ValueError("two ranks were saved")
        if self.workers == 0:
            os._exit(3)
        self.step += 1 if self.world == 2 else -1

main(*sys.argv[1:])
"""
EXACT = {"lost": 0, "doubled": 0, "exact": True}


def test_a_wrong_loader_is_seen(tmp_path, monkeypatch):
    cases = ("same", "1 rank", "4 ranks", "no workers")
    monkeypatch.setattr(resume, "CASES", {name: resume.CASES[name] for name in cases})
    program = tmp_path / "wrong.py"
    program.write_text(WRONG.format(folder=str(Path(resume_programs.__file__).parent)))
    monkeypatch.setitem(LOADERS, "wrong", LOADERS["torch"])
    row = measured("wrong", sys.executable, program)
    assert row["uninterrupted"] == EXACT | {"exact": False}  # in batches, not at once
    cases = row["cases"]
    assert cases["same"] == {"lost": BATCH, "doubled": 0, "exact": False, "next": EXACT}
    assert cases["4 ranks"] == {"lost": 0, "doubled": BATCH, "exact": False, "next": EXACT}
    assert cases["1 rank"] == {"refused": "ValueError: two ranks were saved"}
    assert "without a word" in cases["no workers"]["refused"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["torch", "fastvid"])
def test_nothing_is_lost_or_doubled(name, monkeypatch):
    monkeypatch.setattr(resume, "CASES", {"second epoch by 4 ranks": (1, 4, 1)})
    row = measured(name, sys.executable)
    assert row["uninterrupted"] == EXACT | {"exact": False}  # in batches, not at once
    assert row["cases"] == {"second epoch by 4 ranks": EXACT | {"next": EXACT}}


def test_batches_of_ranks_are_one_global_batch_and_other_batches_are_not_exact():
    whole = [[[0, step, [2 * step + rank]] for step in range(SAMPLES // 2)] for rank in range(2)]
    steps = epoch_of(whole, 0)
    assert steps[3] == [6, 7]
    assert epoch_of(whole, 1) == {}
    assert judged(steps, steps) == EXACT
    swapped = steps | {3: steps[4], 4: steps[3]}
    assert judged(swapped, steps) == {"lost": 0, "doubled": 0, "exact": False}
    assert judged(steps | {3: [6, 6]}, steps) == {"lost": 1, "doubled": 1, "exact": False}


def test_every_loader_says_where_its_settings_are_from():
    assert 0 < SAVED < resume.KILLED < STEPS
    for kind in LOADERS.values():
        title, source = kind.__doc__.split("\n\n")
        assert title
        assert source.strip()
        assert set(kind.offers.split()) <= {"world", "workers"}


def test_a_loader_is_judged_against_its_closest_rival():
    times = {"litdata": 2.7, "kept open": 2.4}
    entries = [
        {
            "pipeline": name,
            "clips_a_second": 100 * ratio,
            "fastvid_is_faster_by": dict.fromkeys(("wall", "wall_min", "wall_max"), ratio),
        }
        for name, ratio in times.items()
    ]
    (goal,) = load.goals({"profile": "compact", "page-cached": entries}, "wall")
    assert (goal["what"], goal["found"], goal["met"]) == ("times kept open", 2.4, False)
