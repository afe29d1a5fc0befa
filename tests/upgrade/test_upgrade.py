"""What version 0.2 wrote is used by this one: its datasets, loader states and runs, see `version_02`."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

import fastvid
from fastvid.cli.main import main as fastvid_command
from fastvid.errors import StateError, UsageError
from tests.docs import test_snippets as snippets
from tests.upgrade import version_02
from tests.upgrade.version_02 import run

CHANGED = "paced buckets"
"""The one loader of a dataset that is not in place whose clips have other frames than in 0.2."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(Path(__file__).with_name("version_02.tar.xz")) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def folder(kept, tmp_path, monkeypatch):
    """A copy of what 0.2 wrote, as the current folder."""
    folder = shutil.copytree(kept, tmp_path / "work")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # for the model of the recipe
    return folder


@pytest.fixture
def told(kept):
    """What 0.2 delivered."""
    return json.loads((kept / "told.json").read_text())


def test_datasets_open_with_the_same_frames(folder, told, caplog):
    for name, dataset in version_02.datasets(folder).items():
        assert version_02.pictures(dataset) == told["pictures"][name]
    (warning,) = [record.getMessage() for record in caplog.records if "0.2" in record.getMessage()]
    assert "in place was indexed by fastvid 0.2" in warning
    run("verify", "encoded")
    assert fastvid.open("encoded", generation="paper").generation.number == 1  # which 0.2 named
    # The second film is turned, which 0.2 did not see.
    for name, words in (("in place", ["--root", "videos"]), ("tars", [])):
        run("index", name, *words)
        run("verify", name)
        now, before = version_02.pictures(version_02.datasets(folder)[name]), told["pictures"][name]
        plain, turned = before
        assert now[plain] == before[plain]
        assert now[turned][0] == [14, 64, 48, 3]


def test_verify_of_tars_says_what_to_do(folder, capsys):
    assert fastvid_command(["verify", "tars"]) == 1
    assert "run `fastvid index`" in capsys.readouterr().out


def test_states_resume_with_the_same_clips(folder, told):
    for name, loader in version_02.loaders(folder).items():
        state = told["loaders"][name]["state"]
        if name == CHANGED:
            with pytest.raises(StateError, match="AtFps spread the frames of a bucket"):
                loader.load_state_dict(state)
            continue
        loader.load_state_dict(state)
        assert version_02.clips(loader) == told["loaders"][name]["clips"], name


def test_states_of_videos_that_were_indexed_again_are_refused(folder, told):
    run("index", "in place", "--root", "videos")
    loaders = version_02.loaders(folder)
    for name in ("in place", "in place, paced"):
        with pytest.raises(StateError, match=r"saved by fastvid 0\.2: the videos were indexed by a later one"):
            loaders[name].load_state_dict(told["loaders"][name]["state"])


def test_a_run_resumes_from_its_checkpoint(folder, told):
    summary = json.loads(run("train", "recipe.py", "run.epochs=2", "--json"))
    assert summary["samples"] == 12
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses == pytest.approx(told["losses"], abs=1e-5)
    run("weights", "run", "--out", "weights.pt")


def test_datasets_are_changed(folder):
    Path("labels.csv").write_text("key,caption\na/0,another film\n")
    run("relabel", "encoded", "--from", "labels.csv")
    run("remove", "encoded", "--keys", "a/2")
    # The ffmpeg here may be another build than that of the archive.
    run("add", "encoded", "videos", "--allow-encoder-change")
    run("gc", "encoded", "--yes")
    # The generation that 0.2 named is kept.
    tagged = {entry["number"]: entry["tags"] for entry in json.loads(run("log", "encoded", "--json")) if entry["tags"]}
    assert tagged == {1: ["paper"]}
    assert "a/2" in fastvid.open("encoded", generation="paper").keys.to_pylist()
    run("inspect", "encoded", "--generation", "paper")
    with pytest.raises(UsageError, match="no generation has the tag 'thesis'"):
        fastvid.open("encoded", generation="thesis")
    dataset = fastvid.open("encoded")
    assert {"plain", "turned", "a/0"} < {*dataset.keys.to_pylist()}
    assert dataset["a/0"].annotations["caption"] == "another film"
    run("verify", "encoded")


def test_a_job_that_enlarges_as_02_did_is_resumed_so(folder, capsys):
    """The record of 0.2 is that of a job with ``--enlarge``."""
    words = ["shard", "videos", "--out", "half", "--short-side", "48", "--samples-per-shard", "1"]
    run(*words, "--enlarge", "--part", "0/2")
    assert fastvid_command(words) == 1
    assert "--enlarge if 0.2 began it" in capsys.readouterr().err
    assert "2 packed" in run(*words, "--enlarge")


@pytest.mark.parametrize(
    ("command", "instead"), [("copy", "rclone"), ("diff", "find --json"), ("tag", "gc --keep"), ("show", "one of")]
)
def test_a_removed_command_names_what_to_use(command, instead, capsys):
    assert fastvid_command([command, "encoded"]) == 2
    assert instead in capsys.readouterr().err


@pytest.mark.soak
def test_the_upgrade_notes_run(folder):
    Path("shards").mkdir()
    text = (snippets.ROOT / "CHANGELOG.md").read_text()
    notes = text.partition("### Upgrading from 0.2\n")[2].partition("\n### ")[0]
    code = snippets.BLOCK.findall(notes)
    assert {kind for kind, _ in code} == {"bash", "python"}
    snippets.work_folder(folder, None)
    for name, place in (("encoded", "mine"), ("in place", "here")):
        Path(name).rename(Path("shards").resolve() / place)
    snippets.run(code, folder)
