"""The whole command: verdicts, exit codes, parts, and resuming."""

import json
import os
import re
import shutil
import subprocess

import pandas as pd
import pytest
import webdataset

import fastvid
from fastvid.cli.main import main
from fastvid.errors import JobError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.media.ffmpeg import Limits
from fastvid.media.reasons import Reason, explain_note
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import JobPart
from fastvid.storage import LocalStorage
from tests.datasets import make_clip
from tests.sharding.shardtools import SMALL, command, ledger, make, other_build, tars

OPTIONS = ["--short-side", "64", "--samples-per-shard", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten videos in two classes and two files that are no videos."""
    folder = tmp_path_factory.mktemp("raw")
    for number in range(10):
        label = ("run", "jump")[number % 2]
        make(folder / label / f"v{number}.mp4", "-preset", "ultrafast", frames=4 + number, rate=str(10 + number))
    (folder / "run" / "text.mp4").write_text("no video")
    (folder / "jump" / "empty.mp4").touch()
    (folder / "notes.txt").write_text("for people")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done = command(folder, "--out", out, *OPTIONS, "--workers", 2)
    assert done.returncode == 3, done.stderr
    return out, done


def test_summary_counts_rejections_by_reason_and_sets_the_exit_code(folder, undisturbed):
    out, done = undisturbed
    assert re.search(r"10 packed\n", done.stdout)
    assert re.search(r"2 rejected\n\s+1   empty: .*\n\s+1   not-video: .*\n", done.stdout)
    assert "1 ignored: .txt file" in done.stdout
    assert "rejected run/text.mp4: not-video" in done.stdout
    assert not re.search(r"packed", done.stderr)
    rows = {row["source_id"]: row for row in ledger(out)}
    assert len(rows) == 12
    assert {row["status"] for row in rows.values()} == {"packed", "rejected"}
    assert rows["jump/empty.mp4"]["reason"] == "empty"
    assert rows["run/v0.mp4"]["num_frames"] == 4
    assert rows["run/v0.mp4"]["bytes_in"] == (folder / "run" / "v0.mp4").stat().st_size
    assert sorted(os.listdir(out / "generations")) == ["000001.json"]
    assert not (out / "ledger-parts").exists()
    dataset = Dataset(str(out))
    assert (dataset.classes, len(dataset)) == (("jump", "run"), 10)
    labels = dict(zip(dataset.keys.to_pylist(), dataset.labels.tolist(), strict=True))
    assert all(dataset.classes[label] == key.split("/")[0] for key, label in labels.items())
    info = fastvid.open(out)["jump/v3"].info
    assert (info.num_frames, info.fps, info.height) == (7, 13, 64)


# webdataset leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_and_tables_are_readable_by_standard_tools(undisturbed):
    out, _ = undisturbed
    samples = [
        sample
        for path in sorted(out.glob("*.tar"))
        for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    ]
    assert len(samples) == 10
    meta = json.loads(samples[0]["json"])
    assert meta["conforms"]
    assert len(meta["source_sha256"]) == 64
    facts = pd.concat([pd.read_parquet(path) for path in sorted(out.glob("data-*.parquet"))])
    assert facts["conforms"].all()
    assert set(facts["key"]) == {sample["__key__"] for sample in samples}
    names = subprocess.run(["tar", "tf", next(out.glob("*.tar"))], check=True, capture_output=True, text=True).stdout
    assert all(re.fullmatch(r"(run|jump)/v\d\.(json|cls|mp4)", name) for name in names.split())
    classes = Dataset(str(out)).classes
    for sample in samples:
        meta, name = json.loads(sample["json"]), sample["__key__"].partition("/")[0]
        assert (classes[int(sample["cls"])], meta["class"], meta["label"]) == (name, name, int(sample["cls"]))


def test_staged_samples_are_reused_unless_damaged(folder, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert command(folder, "--out", out, *OPTIONS, "--workers", 1, fault="encode:9").returncode == -9
    # Samples of complete shards too, if it was killed while one was packed.
    waiting = sorted((out / "ledger-parts" / "staging").rglob("0*"))
    staged = [path for path in waiting if f"{path.parent.name}.tar" not in tars(out)]
    assert 3 * len(tars(out)) + len(staged) == 8
    # Like a power failure.
    staged[0].write_bytes(staged[0].read_bytes()[:-100])
    done = command(folder, "--out", out, *OPTIONS, "--workers", 2)
    assert done.returncode == 3, done.stderr
    assert tars(out) == tars(undisturbed[0])


def test_rejected_source_moves_no_other_sample(folder, undisturbed, tmp_path):
    raw = tmp_path / "raw"
    shutil.copytree(folder, raw)
    victim = raw / "run" / "v4.mp4"
    victim.write_bytes(bytes(victim.stat().st_size))
    assert command(raw, "--out", tmp_path / "out", *OPTIONS).returncode == 3
    before, after = tars(undisturbed[0]), tars(tmp_path / "out")
    assert len(set(before.items()) ^ set(after.items())) == 2


def test_unfinished_job_resumes_only_with_the_same_arguments_sources_and_build(folder, tmp_path):
    out, raw = tmp_path / "out", tmp_path / "raw"
    assert command(folder, "--out", out, *OPTIONS, "--workers", 1, fault="ledger:2").returncode == -9
    shutil.copytree(folder, raw)
    (raw / "run" / "v0.mp4").write_bytes((raw / "run" / "v2.mp4").read_bytes())
    other = {"FASTVID_FFMPEG": other_build(tmp_path / "ffmpeg")}
    for source, options, variables, said in (
        (folder, ["--crf", "30"], {}, "profile.crf"),
        (folder, ["--seed", "1"], {}, "order.seed"),
        (folder, ["--max-seconds", "0.3"], {}, "max_seconds"),
        (folder, ["--samples-per-shard", "4"], {}, "order.samples_per_shard"),
        (raw, [], {}, "sources.bytes"),
        (folder, [], other, "encoder."),
    ):
        done = command(source, "--out", out, *OPTIONS, *options, **variables)
        assert done.returncode == 1
        assert f"the unfinished job here has {said}" in done.stderr
    assert "--allow-encoder-change" in done.stderr
    done = command(folder, "--out", out, *OPTIONS, "--allow-encoder-change", **other)
    assert done.returncode == 3, done.stderr
    generation = json.loads((out / "generations" / "000001.json").read_text())
    assert len({shard["encoder"]["version"] for shard in generation["shards"]}) == 2


def test_summaries_explain_warnings_and_name_the_next_command(folder, tmp_path, capsys, caplog):
    with caplog.at_level("INFO"):
        words = ["shard", str(folder), "--out", str(tmp_path / "set"), "--short-side", "128", "--workers", "1"]
        assert main(words) == 3
    said = capsys.readouterr().out
    assert "10   kept-small (smaller than the short side; --enlarge enlarges them)" in said
    assert fastvid.open(str(tmp_path / "set")).column("height").to_pylist() == [64] * 10
    assert f"`fastvid inspect {tmp_path / 'set'}` shows it" in said
    assert re.search(r"\d+ videos in 2 classes, [\d.]+ kB", caplog.text)
    assert explain_note("whole: why").endswith("`fastvid shard` makes them fast)")
    assert explain_note("size") != explain_note("sizeless") == "sizeless"


def test_finished_dataset_is_not_changed(folder, undisturbed):
    out, first = undisturbed
    before = tars(out)
    again = command(folder, "--out", out, *OPTIONS)
    assert (again.returncode, again.stdout) == (3, first.stdout)
    assert command(folder, "--out", out, *OPTIONS, "--allow-rejected").returncode == 0
    other = command(folder, "--out", out, *OPTIONS, "--crf", "40")
    assert other.returncode == 2
    assert "differs in profile.crf" in other.stderr
    assert tars(out) == before


def test_a_folder_in_use_and_one_that_cannot_be_created_are_errors(folder, tmp_path):
    out = tmp_path / "out"
    with lock_folder(LocalStorage(out)):
        done = command(folder, "--out", out, *OPTIONS)
    assert done.returncode == 1
    assert "another job is running here" in done.stderr
    assert os.listdir(out) == []
    (tmp_path / "file").touch()
    done = command(folder, "--out", tmp_path / "file", *OPTIONS)
    assert done.returncode == 1
    assert "folder cannot be created" in done.stderr


def test_job_without_packed_sources_fails_with_a_ledger_and_no_dataset(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.mp4").write_text("text")
    with pytest.raises(JobError, match="none of 1 sources could be packed: 1 not-video"):
        run_job(tmp_path / "raw", str(tmp_path / "out"), profile=SMALL, workers=1)
    assert ledger(tmp_path / "out")[0]["reason"] == "not-video"
    assert not (tmp_path / "out" / "dataset.json").exists()
    # The same command tries them again.
    make_clip(tmp_path / "raw" / "a.mp4", frames=8)
    run_job(tmp_path / "raw", str(tmp_path / "out"), profile=SMALL, workers=1)
    assert len(fastvid.open(tmp_path / "out")) == 1


def test_slow_source_is_retried_alone_before_rejection(folder, tmp_path):
    limits = Limits(seconds=0.001, seconds_per_frame=0.0)
    with pytest.raises(JobError, match="timeout"):
        run_job(str(folder / "run" / "v0.mp4"), str(tmp_path / "out"), profile=SMALL, workers=1, limits=limits)
    (row,) = ledger(tmp_path / "out")
    assert row["reason"] == Reason.TIMEOUT
    # The job's own files show that the limit was different the second time.
    assert "longer than 0 s" in row["message"] or "phase" in row["message"]


def test_annotation_columns_reach_the_dataset_and_missing_files_the_ledger(folder, tmp_path):
    table = tmp_path / "clips.csv"
    table.write_text(
        "path,label,split,texture,start,end,source_num_frames,duration,num_frames\n"
        "run/v8.mp4,left,train,3,,,99,0:10,7\njump/v9.mp4,right,test,4,0.1,0.4,99,0:10,7\nrun/gone.mp4,left,test,5,,,,,\n"
    )
    report = fastvid.shard(
        [str(folder)], out=str(tmp_path / "out"), annotations=f"csv:{table}", profile=SMALL, workers=1
    )
    assert (report.packed, dict(report.rejected)) == (2, {Reason.MISSING: 1})
    assert sum(count for kind, count in report.ignored.items() if "without annotation (" in kind) == 10
    dataset = Dataset(str(tmp_path / "out"), split="test")
    assert dataset.keys.to_pylist() == ["jump/v9_00000100_00000400"]
    assert dataset.classes[int(dataset.labels[0])] == "right"
    row = dataset.annotations.to_pylist()[int(dataset.rows[0])]
    # At 19 frames per second, 0.1 s to 0.4 s are frames 2 to 7.
    assert (row["texture"], row["num_frames"], row["start_seconds"]) == (4, 6, pytest.approx(2 / 19))
    # The table's own columns of these names are kept under other names.
    assert (row["source_num_frames"], row["source_duration"]) == (99, "0:10")


def test_long_videos_are_split_into_segments_of_equal_length(tmp_path):
    make(tmp_path / "raw" / "long.mp4", frames=50, rate="10")
    report = run_job(str(tmp_path / "raw"), str(tmp_path / "out"), profile=SMALL, workers=1, max_seconds=2)
    assert report.packed == 1
    rows = Dataset(str(tmp_path / "out")).annotations.to_pylist()
    assert [(row["key"], row["num_frames"], row["start_seconds"], row["parent"]) for row in rows] == [
        ("long/0000", 16, 0.0, "long.mp4"),
        ("long/0001", 17, 1.6, "long.mp4"),
        ("long/0002", 17, 3.3, "long.mp4"),
    ]
    (row,) = ledger(tmp_path / "out")
    assert (row["num_frames"], row["key"]) == (50, "long")


def test_wrong_arguments_are_named(folder, tmp_path):
    for arguments, message in (
        ({"profile": "fast"}, "use one of compact, copy, hevc, intra, mjpeg, small, tiles, vp9"),
        ({"workers": 0}, "workers is 0, expected at least 1"),
        ({"samples_per_shard": 0}, "samples_per_shard is 0, expected at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            run_job(str(folder), str(tmp_path / "out"), **arguments)
    assert not (tmp_path / "out").exists()


def same(out, undisturbed):
    assert tars(out) == tars(undisturbed[0])
    assert ledger(out) == ledger(undisturbed[0])
    assert sorted(os.listdir(out)) == sorted(os.listdir(undisturbed[0]))


@pytest.mark.parametrize("command", ["shard", "index"])
@pytest.mark.parametrize(
    "words",
    [
        ["nowhere"],
        ["nowhere", "--part", "0/2"],
        ["."],
        [".", "--annotations", "csv:no"],
        [".", "--annotations", "csv:no", "--part", "0/2"],
    ],
)
def test_a_mistake_in_the_sources_leaves_no_folder_behind(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, *words, "--out", "made/data"]) == 2
    assert os.listdir() == []


def test_killed_part_resumes_as_itself_or_with_another_division(folder, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert command(folder, "--out", out, *OPTIONS, "--part", "0/2", "--workers", 1, fault="encode:3").returncode == -9
    again = command(folder, "--out", out, *OPTIONS, "--part", "0/2")
    assert "resuming the unfinished job" in again.stderr
    for part in range(3):
        assert command(folder, "--out", out, *OPTIONS, "--part", f"{part}/3").returncode in (0, 3)
    assert command(folder, "--out", out, *OPTIONS).returncode == 3
    same(out, undisturbed)


def test_part_without_shards_does_nothing(folder, tmp_path):
    done = command(folder, "--out", tmp_path / "out", *OPTIONS, "--part", "7/8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("part 7/8; run the command without --part to write the dataset\n")
    assert tars(tmp_path / "out") == {}


def test_tar_lost_after_its_part_finished_is_rebuilt(folder, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert command(folder, "--out", out, *OPTIONS, "--part", "0/2").returncode in (0, 3)
    lost = min(tars(out))
    (out / lost).write_bytes((out / lost).read_bytes()[:-512])
    merged = command(folder, "--out", out, *OPTIONS)
    assert merged.returncode == 3
    assert f"{lost} does not match its part" in merged.stderr
    same(out, undisturbed)


def test_only_parts_may_share_a_folder(tmp_path):
    store = LocalStorage(tmp_path / "out")

    def refused(part):
        with pytest.raises(JobError, match="another job"), lock_folder(store, part):
            pass

    with lock_folder(store, JobPart(0, 2)):
        with lock_folder(store, JobPart(1, 2)):
            refused(JobPart(1, 2))
        refused(None)
    with lock_folder(store):
        refused(JobPart(0, 2))
    with lock_folder(store):
        pass
    assert not list((tmp_path / "out").iterdir())
