"""One video, one truth: every file by every way is what a player shows, or refused for the reason that is listed.

`counts.json` beside this file has the counts of ``make soak``, for the pages that speak of them.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.errors import FastvidError
from tests import forks
from tests.skips import soak_but
from tests.truth import judge
from tests.truth.recipes import ENCODED, PLACE, WAYS, Recipe, make
from tests.truth.table import SUITE, recipes

COUNTS = Path(__file__).with_name("counts.json")
OUTCOMES = ("equal", "equal with a note", "refused", "error", "unexpected")
# Some files by the ways that differ most, and all files by all ways.
CELLS = [("suite", way) for way in ("sample", "copy", "compact")] + [("all", way) for way in WAYS]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function that makes the files of a tier once, and what it made."""
    made = {}

    def of(tier):
        if tier not in made:
            folder, work = tmp_path_factory.mktemp(tier), tmp_path_factory.mktemp("work")
            chosen = [recipe for recipe in recipes() if tier == "all" or recipe.name in SUITE]
            with ThreadPoolExecutor(2) as pool:
                paths = list(pool.map(lambda recipe: make(recipe, folder, work), chosen))
            with ThreadPoolExecutor(2) as pool:
                truths = list(pool.map(_truth, paths, chosen))
            made[tier] = folder, list(zip(chosen, truths, strict=True))
        return made[tier]

    return of


def _truth(path: Path, recipe: Recipe) -> judge.Truth | None:
    """Return what a player shows, None of a file that is to be refused by all."""
    try:
        return judge.play(path, recipe)
    except (OSError, ValueError, AssertionError, subprocess.SubprocessError):
        return None


def taken(way: str, folder: Path, out: Path) -> dict[str, dict]:
    """Index or encode a folder; return the rows of the ledger by file."""
    # Painted numbers are read from pictures of 256 lines, though compressed.
    command = ["index", folder, "--prove", way] if way in PLACE else ["shard", folder, "--profile", way]
    encoded = ["--audio", "aac", "--enlarge"] if way in ENCODED else []
    done = forks.start_fastvid(*command, "--out", out, "--allow-rejected", *encoded)
    assert done.wait(3600) == 0, done.communicate()[1]
    return {row["source_id"]: row for row in pq.read_table(out / "ledger.parquet").to_pylist()}


def outcome(recipe: Recipe, truth: judge.Truth | None, way: str, row: dict, video, reading: str) -> tuple[str, str]:
    """Return the outcome of a cell, and what was not expected."""
    wanted = recipe.verdict(way).split(" or ")
    if row["status"] != "packed":
        listed = row["reason"] in wanted
        return ("refused", "") if listed else ("unexpected", f"refused: {row['reason']}: {row['message']}")
    try:
        wrong = judge.READINGS[reading](video, truth, recipe, way) if truth is not None else "no player shows it"
    except FastvidError as error:
        return ("error", "") if "error" in wanted else ("unexpected", f"error: {error}")
    if "error" in wanted and reading in ("seconds", "sound") and "equal" not in wanted:
        return "error", ""  # of all pictures, see the other readings; a player shows some of them at other times
    if wrong:
        return "unexpected", wrong
    notes = [one.removeprefix("equal").strip() for one in wanted if one.startswith("equal")]
    if not notes:
        return "unexpected", f"packed, noted {row['warnings']}, but {' or '.join(wanted)} was expected"
    if "" in notes:
        return "equal", ""
    noted = any(note in row["warnings"] for note in notes)
    return ("equal with a note", "") if noted else ("unexpected", f"no note of {notes}, but {row['warnings']}")


@pytest.mark.parametrize(("tier", "way"), soak_but(CELLS, *CELLS[:3]))
def test_every_way_shows_what_a_player_shows(files, tier, way, tmp_path):
    folder, table = files(tier)
    rows = taken(way, folder, tmp_path / "out")
    dataset = fastvid.open(tmp_path / "out")
    videos = {video.key: video for video in dataset}
    clips = judge.clips(dataset)
    counts, wrong = Counter(), []
    for recipe, truth in table:
        row = rows[recipe.file]
        if truth is not None and recipe.numbers is not None and not any(recipe.crop):
            assert judge.numbers_of(truth, recipe) == list(recipe.numbers), recipe.name
        video = videos.get(row.get("key"))
        for reading in judge.READINGS:
            found, message = outcome(recipe, truth, way, row, video, reading)
            counts[found] += 1
            if message:
                wrong.append(f"{recipe.name}, {reading}: {message}")
        if video is not None:
            message = judge.loaded(clips.get(video.key), video, truth, recipe, way)
            if message and "error" not in recipe.verdict(way):
                wrong.append(f"{recipe.name}, loader: {message}")
                counts["unexpected"] += 1
    if tier == "all":
        _record("table", way, {name: counts[name] for name in OUTCOMES} | {"files": len(table)})
    assert not wrong, "\n".join(wrong)


def _record(table: str, row: str, counts: dict[str, object]) -> None:
    known = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    known.setdefault(table, {})[row] = counts
    COUNTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
