"""One video, one truth: every file by every way is what a player shows, or refused for the reason that is listed."""

from __future__ import annotations

import subprocess
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


def unexpected(recipe: Recipe, truth: judge.Truth | None, way: str, row: dict, video, reading: str) -> str:
    """Return what was not expected of a cell."""
    wanted = recipe.verdict(way).split(" or ")
    if row["status"] != "packed":
        return "" if row["reason"] in wanted else f"refused: {row['reason']}: {row['message']}"
    try:
        wrong = judge.READINGS[reading](video, truth, recipe, way) if truth is not None else "no player shows it"
    except FastvidError as error:
        return "" if "error" in wanted else f"error: {error}"
    if "error" in wanted and reading in ("seconds", "sound") and "equal" not in wanted:
        return ""  # of all pictures, see the other readings; a player shows some of them at other times
    notes = [one.removeprefix("equal").strip() for one in wanted if one.startswith("equal")]
    if wrong or "" in notes or any(note in row["warnings"] for note in notes):
        return wrong
    return f"packed, noted {row['warnings']}, but {' or '.join(wanted)} was expected"


@pytest.mark.parametrize(("tier", "way"), soak_but(CELLS, *CELLS[:3]))
def test_every_way_shows_what_a_player_shows(files, tier, way, tmp_path):
    folder, table = files(tier)
    rows = taken(way, folder, tmp_path / "out")
    dataset = fastvid.open(tmp_path / "out")
    videos = {video.key: video for video in dataset}
    clips = judge.clips(dataset)
    wrong = []
    for recipe, truth in table:
        row = rows[recipe.file]
        if truth is not None and recipe.numbers is not None and not any(recipe.crop):
            assert judge.numbers_of(truth, recipe) == list(recipe.numbers), recipe.name
        video = videos.get(row.get("key"))
        found = {reading: unexpected(recipe, truth, way, row, video, reading) for reading in judge.READINGS}
        if video is not None and "error" not in recipe.verdict(way):
            found["loader"] = judge.loaded(clips.get(video.key), video, truth, recipe, way)
        wrong += [f"{recipe.name}, {reading}: {message}" for reading, message in found.items() if message]
    assert not wrong, "\n".join(wrong)
