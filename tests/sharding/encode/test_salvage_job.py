"""Jobs with max_bad_frames: what the dataset, its tables and its tars say of a salvaged video."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from tests.makers import encode as write
from tests.makers import paint, read_numbers
from tests.sharding.encode.test_salvage import FRAMES, FRONT, X264, truncated, zeroed
from tests.sharding.shardtools import ledger, tars

SMALL = {"profile": PROFILES["compact"].changed(short_side=96), "workers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A good video, one whose frames from 150 to 167 are damaged, and one that ends early."""
    where = tmp_path_factory.mktemp("videos")
    good = where / "raw" / "good.mp4"
    good.parent.mkdir()
    write(good, paint(FRAMES, (96, 160)), [*X264, *FRONT])
    shutil.copy(zeroed(good, [150], where), where / "raw" / "broken.mp4")
    shutil.copy(truncated(good, 0.4, where), where / "raw" / "short.mp4")
    return where / "raw"


@pytest.fixture(scope="module")
def salvaged(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("salvaged") / "out"
    run_job(folder, out, max_bad_frames="50%", **SMALL)
    return out


def rows(out):
    return {row["source_id"]: row for row in ledger(out)}


def test_tables_say_what_is_kept_and_what_is_left_out(salvaged):
    found = rows(salvaged)
    assert found["good.mp4"]["status"] == found["broken.mp4"]["status"] == "packed"
    assert found["broken.mp4"]["warnings"] == ["salvaged"]
    assert found["broken.mp4"]["message"].endswith("150 of 240 frames, 0.00 s to 6.00 s")
    assert found["broken.mp4"]["num_frames"] == 150
    assert found["good.mp4"]["warnings"] == []
    assert found["short.mp4"]["reason"] == "truncated"
    assert "of 240 frames would be left out and max_bad_frames allows 120" in found["short.mp4"]["message"]
    dataset = Dataset(str(salvaged))
    annotations = {row["key"]: row for row in dataset.annotations.to_pylist()}
    facts = pq.read_table(next(salvaged.glob("data-*.parquet"))).to_pylist()
    for table in (annotations, {row["key"]: row for row in facts}):
        place = [table["broken"][name] for name in ("parent", "start_seconds", "end_seconds")]
        assert place == ["broken.mp4", 0.0, 6.0]
        assert table["good"]["parent"] is None
    assert {key: row["bad_frames"] for key, row in annotations.items()} == {"broken": 90, "good": None}


def test_salvaged_videos_can_be_selected_and_read(salvaged):
    assert fastvid.open(salvaged, where="bad_frames > 0").keys.to_pylist() == ["broken"]
    assert fastvid.open(salvaged, where="bad_frames IS NULL").keys.to_pylist() == ["good"]
    pictures = fastvid.open(salvaged)["broken"].frames([0, 77, 143]).data
    assert read_numbers(pictures[..., 1]) == [0, 77, 143]


def test_verify_accepts_salvaged_videos_and_their_tars_restore_the_rows(salvaged, tmp_path, capsys):
    assert main(["verify", str(salvaged)]) == 0
    only = tmp_path / "tars"
    only.mkdir()
    for name in tars(salvaged):
        shutil.copy(salvaged / name, only / name)
    assert main(["index", str(only), "--out", str(only)]) == 0
    old, new = (Dataset(str(one)).annotations.to_pylist() for one in (salvaged, only))
    assert [row["bad_frames"] for row in new] == [row["bad_frames"] for row in old]
    assert sorted(row["bad_frames"] or 0 for row in new) == [0, 90]


def test_without_the_option_damaged_videos_are_rejected_and_the_rest_is_the_same(folder, salvaged, tmp_path):
    run_job(folder, tmp_path / "out", **SMALL)
    found = rows(tmp_path / "out")
    assert [found[name]["reason"] for name in ("broken.mp4", "good.mp4", "short.mp4")] == ["damaged", None, "truncated"]
    (plain,) = Dataset(str(tmp_path / "out")).annotations.to_pylist()
    assert "bad_frames" not in plain
    assert video(tmp_path / "out", "good") == video(salvaged, "good")


def video(out, key):
    """Return the bytes of a sample's MP4."""
    row = next(row for row in pq.read_table(next(out.glob("data-*.parquet"))).to_pylist() if row["key"] == key)
    with open(out / "data-000000.tar", "rb") as tar:
        tar.seek(row["member_offset"])
        return tar.read(row["member_size"])


def test_other_limits_do_not_resume_a_job(folder, salvaged):
    run_job(folder, salvaged, max_bad_frames="50%", **SMALL)
    for limit in (None, "51%", 50):
        with pytest.raises(UsageError, match="differs in max_bad_frames"):
            run_job(folder, salvaged, max_bad_frames=limit, **SMALL)


def test_add_salvages_on_request(folder, tmp_path):
    first, more = tmp_path / "first", tmp_path / "more"
    first.mkdir()
    more.mkdir()
    shutil.copy(folder / "good.mp4", first)
    run_job(first, tmp_path / "out", **SMALL)
    shutil.copy(folder / "short.mp4", more)
    added = add_sources(str(tmp_path / "out"), str(more), workers=1, max_bad_frames=200)
    assert added.report.packed == 1
    found = {row["key"]: row["bad_frames"] for row in Dataset(str(tmp_path / "out")).annotations.to_pylist()}
    assert found["good"] is None
    assert 144 <= found["short"] <= 200


def test_command_prints_salvaged_and_refuses_what_is_no_limit(folder, tmp_path, capsys):
    options = ["--short-side", "96", "--workers", "1", "--allow-rejected"]
    assert main(["shard", str(folder), "--out", str(tmp_path / "out"), "--max-bad-frames", "50%", *options]) == 0
    assert "1   salvaged" in capsys.readouterr().out
    for limit in ("half", "-1", "120%"):
        assert main(["shard", str(folder), "--out", str(tmp_path / "no"), "--max-bad-frames", limit, *options]) == 2
        assert "max_bad_frames" in capsys.readouterr().err
    refused = ["--max-bad-frames", "5%", "--profile", "copy"]
    assert main(["shard", str(folder), "--out", str(tmp_path / "no"), *refused]) == 2
    assert "cannot leave out damaged frames" in capsys.readouterr().err
