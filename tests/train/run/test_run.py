"""Whole runs on real clips: torchrun, killed workers, signals, evaluation."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn

from fastvid.cli.main import main as fastvid_command
from fastvid.errors import FastvidError, StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import read_head, swap_head
from fastvid.load.order.draws import Permutation
from fastvid.models import zoo
from fastvid.runtime.processes import available_cores
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.in_place import index_videos
from fastvid.storage import LocalStorage
from fastvid.train.config import config as recipes
from fastvid.train.config.config import OptimConfig, OptimizerName
from fastvid.train.parts.optim import make_optimizer, state_per_weight
from fastvid.train.parts.replica import Lineage
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints
from fastvid.train.run import dry_run, launch
from fastvid.train.run.assemble import open_datasets
from tests import forks
from tests.load.tools import until
from tests.train import small, toy

ROOT = Path(__file__).parents[3]
TRAIN, HELD_OUT = 24, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    columns = {"picture": [n % 4 for n in range(TRAIN + HELD_OUT)], "gap": [None, *range(TRAIN + HELD_OUT - 1)]}
    small.pack(folder, TRAIN, HELD_OUT, 16, **columns)
    (folder / "recipe.py").write_text(small.RECIPE.format(data=str(folder / "shards"), out=str(folder / "alone")))
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    words = ("fastvid.train", folder / "recipe.py", f"run.out={folder / 'undisturbed'}", "--json")
    result, other = done = forks.ranks(2, *words, folder=folder)
    assert [rank.returncode for rank in done] == [0, 0], done
    # stdout is data: one line, from one rank.
    assert json.loads(result.stdout) == json.loads((folder / "undisturbed" / "summary.json").read_text())
    assert other.stdout == ""
    return folder / "undisturbed"


def test_a_run_of_two_ranks_writes_all_its_files(folder, undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["over"] is True
    assert summary["samples"] == 2 * TRAIN
    assert summary["world_size"] == 2
    assert summary["eval"]["scored"] == summary["eval"]["total"] == HELD_OUT
    config = json.loads((undisturbed / "config.json").read_text())
    assert config["data"]["generation"] == 1
    assert config["model"]["num_classes"] == 2
    rows = metrics.read(undisturbed / "metrics.jsonl")
    train = metrics.curve(rows)
    assert [row["samples"] for row in train] == list(range(4, 2 * TRAIN + 1, 4))
    assert {"loss", "lr", "grad_norm", "clips_per_s", "wait_percent", "step_ms", "skipped"} <= train[0].keys()
    assert [row["samples"] for row in metrics.curve(rows, "eval")] == [TRAIN, 2 * TRAIN]


def test_a_finished_run_keeps_its_record(folder, undisturbed, tmp_path, capsys, caplog):
    """Started again, also with a setting that it never ran with, it prints its summary; more epochs are trained."""
    out = shutil.copytree(undisturbed, tmp_path / "out")
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    changes = [f"run.out={out}", "optim.base_lr=0.001"]
    assert launch.start([recipes.load(str(folder / "recipe.py"), changes)], as_json=True) == 0
    assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before
    assert json.loads(capsys.readouterr().out) == json.loads((out / "summary.json").read_text())
    assert "optim.base_lr is 0.001, but was 0.02 in the checkpoint" in caplog.text
    caplog.set_level("INFO")
    assert launch.train(recipes.load(str(folder / "recipe.py"), [*changes, "run.epochs=3"])) == 0
    assert "24 clips per epoch in 6 steps of 4; 3 epochs; 1 rank on cpu" in caplog.text
    for name, rate in (("config.json", 0.001), ("config-001.json", 0.02), ("config-002.json", 0.001)):
        assert json.loads((out / name).read_text())["optim"]["base_lr"] == rate
    for damaged in (b"{", b"[]", b"\xff"):
        (out / "summary.json").write_bytes(damaged)
        assert launch.train(recipes.load(str(folder / "recipe.py"), [*changes, "run.epochs=3"])) == 0
        assert json.loads((out / "summary.json").read_text())["samples"] == 3 * TRAIN


@pytest.mark.parametrize(
    ("given", "torchrun", "is_set"), [(None, False, True), ("1", True, True), ("1", False, False), ("4", True, False)]
)
def test_torch_has_the_cores_of_a_rank_unless_told_otherwise(given, torchrun, is_set, monkeypatch):
    for name, value in (("OMP_NUM_THREADS", given), ("TORCHELASTIC_RUN_ID", "x" if torchrun else None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr(launch, "strategy_of", lambda _: SimpleNamespace(start=lambda *_: 0, record="no.json"))
    assert launch.start([SimpleNamespace(run=SimpleNamespace(out="nowhere"))]) == 0
    assert asked == [available_cores()] * is_set


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        (["optim.base_batch_size=1"], False),
        (["optim.base_batch_size=1", "data.global_batch_size=8", "optim.warmup_start=0.125"], False),
        (["optim.base_batch_size=1", "data.global_batch_size=8", "optim.warmup_epochs=0"], True),
        (["optim.base_batch_size=1", "data.global_batch_size=8", "optim.warmup_start=1"], True),
    ],
)
def test_a_first_rate_far_above_the_base_rate_is_warned_of(folder, tmp_path, caplog, changes, *, warned):
    """A batch far larger than that of the base rate, without warm-up; the remedy begins at the base rate."""
    assert fastvid_command(["train", str(folder / "recipe.py"), f"run.out={tmp_path}", *changes, "--dry-run"]) == 0
    said = "the first learning rate is 0.16, 8 times optim.base_lr: data.global_batch_size is 8, "
    assert (f"{said}optim.base_batch_size 1" in caplog.text) == warned
    assert ("set optim.warmup_epochs=2 and optim.warmup_start=0.1250" in caplog.text) == warned


def test_a_tag_names_the_generation_with_which_a_run_starts(folder, tmp_path):
    store = LocalStorage(shutil.copytree(folder / "shards", tmp_path / "shards"))
    _tag(store, "paper", 1)
    keys = Dataset(store.url, split="train").keys.to_pylist()
    remove_samples(store, keys[:4])
    config = recipes.load(str(folder / "recipe.py"), [f"data.path={store.url}"])
    for which, number, left in (("paper", 1, 0), (2, 2, 4), (None, 2, 4)):
        asked = replace(config, data=replace(config.data, generation=which))
        found, train, _ = open_datasets(asked, None, toy.ALONE)
        assert (found.data.generation, len(train)) == (number, len(keys) - left)
    # A resumed run stays where it is, though the tag moves.
    _tag(store, "paper", 2)
    state = {"loader": {"fingerprint": {"generation": 1}}}
    asked = replace(config, data=replace(config.data, generation="paper"))
    assert open_datasets(asked, state, toy.ALONE)[0].data.generation == 1
    with pytest.raises(UsageError, match="thesis"):
        open_datasets(replace(config, data=replace(config.data, generation="thesis")), None, toy.ALONE)


def _tag(store, name, number):
    """Name a generation, as fastvid 0.2 did."""
    head = read_head(store)
    swap_head(store, head, dataset_id=head.dataset_id, generation=head.generation, tags={name: number})


def test_lineage_contains_every_sample_at_its_position(folder, undisturbed):
    dataset = Dataset(str(folder / "shards"), split="train")
    for entry in toy.newest(undisturbed)["lineage"]:
        ids = Permutation(len(dataset), 0, entry["epoch"]).ids(range(len(dataset)))
        expected = Lineage()
        keys = [dataset.key(int(sample)) for sample in ids]
        expected.add(entry["epoch"], *Lineage.of(SimpleNamespace(position=torch.arange(len(keys)), key=keys)))
        assert expected.state_dict() == [entry]


def test_killed_workers_are_restarted_by_torchrun_and_training_resumes(folder, undisturbed):
    # Every process is killed at its eighth step: in the second epoch, and after a restart at the twelfth step.
    # Its clips come from worker processes, those of the uninterrupted run from threads; they are equal.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "fastvid.train", str(folder / "recipe.py"), "data.workers=process"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FASTVID_FAULT": "step:8"}
    result = subprocess.run(
        [*command, f"run.out={folder / 'killed'}"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = metrics.read(folder / "killed" / "metrics.jsonl")
    # The checkpoint of the seventh step may have been in progress.
    assert [row["samples"] for row in rows if row["kind"] == "start"] in ([0, 28], [0, 24])
    whole, pieces = metrics.curve(metrics.read(undisturbed / "metrics.jsonl")), metrics.curve(rows)
    assert [row["samples"] for row in pieces] == [row["samples"] for row in whole]
    assert [row["lr"] for row in pieces] == [row["lr"] for row in whole]
    assert [row["loss"] for row in pieces] == pytest.approx([row["loss"] for row in whole], abs=1e-6)
    before, after = toy.newest(undisturbed), toy.newest(folder / "killed")
    assert before["lineage"] == after["lineage"]
    for name, value in before["replica"]["model"].items():
        assert torch.allclose(value, after["replica"]["model"][name], atol=1e-6), name


def test_separate_evaluation_equals_the_evaluation_of_the_run(folder, undisturbed, capsys):
    assert fastvid_command(["eval", str(folder / "recipe.py"), f"run.out={undisturbed}", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    before = json.loads((undisturbed / "summary.json").read_text())["eval"]
    assert again["top1_percent"] == before["top1_percent"]
    assert again["loss"] == pytest.approx(before["loss"], abs=1e-5)


@pytest.mark.parametrize(("name", "place"), [(None, ""), ("best", ""), (None, "checkpoints")])
def test_the_weights_of_a_run_are_a_file_for_plain_torch(undisturbed, tmp_path, capsys, name, place):
    out = tmp_path / "weights.pth"
    words = ["weights", str(undisturbed / place), "--out", str(out), *(["--checkpoint", name] if name else [])]
    assert fastvid_command(words) == 0
    checkpoint = capsys.readouterr().out.split()[-1]
    found = torch.load(out, weights_only=True)
    model = zoo.build("tsm-r18", num_classes=2, num_frames=2, width=8, dropout=0.2)
    model.load_state_dict(found)
    kept = torch.load(undisturbed / "checkpoints" / checkpoint, weights_only=True)["replica"]["model"]
    assert all(torch.equal(kept[key], found[key]) for key in found)
    # A folder without a run is an error.
    assert fastvid_command(["weights", str(tmp_path), "--out", str(tmp_path / "other.pth")]) == 2
    assert "run has no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "other.pth").exists()


def test_evaluation_by_views_counts_every_video_once_in_each(folder, undisturbed, tmp_path, capsys):
    page = tmp_path / "eval.html"
    words = ["eval", str(folder / "recipe.py"), f"run.out={undisturbed}", "--protocol", "2x3", "--checkpoint", "best"]
    assert fastvid_command([*words, "--json", "--report", str(page)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["protocol"], said["views"], said["scored"]) == ("2x3", 6, HELD_OUT)
    confusion = torch.tensor(said["confusion"])
    assert int(confusion.sum()) == HELD_OUT
    hits = int(confusion.diag().sum())
    assert said["top1_percent"] == pytest.approx(100 * hits / HELD_OUT)
    assert [row["videos"] for row in said["classes"]] == confusion.sum(1).tolist()
    assert "Confusion matrix" in page.read_text()
    assert fastvid_command(words) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (told["protocol"], told["scored"]) == ("2x3", str(HELD_OUT))
    assert "--report FILE" in told["next:"]


def test_a_video_outside_the_dataset_is_predicted_and_drawn(folder, undisturbed, tmp_path, capsys):
    words = ["predict", str(folder / "recipe.py"), str(folder / "0.mp4"), str(folder / "1.mp4")]
    picture = tmp_path / "strip.png"
    assert fastvid_command([*words, f"run.out={undisturbed}", "--top", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[::2] == words[2:]
    assert {line.split()[0] for line in told[1::2]} <= set(Dataset(str(folder / "shards")).classes)
    assert fastvid_command([*words, f"run.out={undisturbed}", "--picture", str(picture), "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["video"] for row in said] == words[2:]
    for row in said:
        assert sum(one["probability"] for one in row["top"]) == pytest.approx(1.0)
        assert {one["class"] for one in row["top"]} == set(Dataset(str(folder / "shards")).classes)
        # The middles of two halves, of 8 and of 9 frames.
        assert row["frames"] == [2, 6]
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    assert fastvid_command([*words, *2 * [str(tmp_path / "broken.mp4")], f"run.out={undisturbed}"]) == 1
    assert capsys.readouterr().err.count(f"{tmp_path}/broken.mp4: file is not") == 2, "all are named at once"
    assert fastvid_command([*words[:2], str(folder), f"run.out={undisturbed}"]) == 2
    assert f"hint: name its videos, for example {folder}/*.mp4" in capsys.readouterr().err


def test_a_dry_run_counts_steps_and_detects_missing_files(folder, tmp_path, capsys):
    words = ["train", str(folder / "recipe.py"), f"run.out={tmp_path / 'dry'}"]
    assert fastvid_command([*words, "--dry-run", "--world", "2"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert fastvid_command([*words, "--dry-run", "--world", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["train_samples"], found["eval_samples"]) == (TRAIN, HELD_OUT)
    assert (found["steps_per_epoch"], found["steps"], found["clips_per_rank"]) == (6, 12, 2)
    assert (told["steps"], told["clips_per_rank"]) == ("12", "2")
    assert found["memory_bytes"]["optimizer"] == 4 * found["parameters"]
    # Ranks that share no batches read whole ones, also with a user-defined strategy, whose options are checked.
    own = [*words, "sync=fastvid.train.strategies.asgd.strategy:Asgd", "--dry-run", "--world", "2", "--json"]
    assert fastvid_command(own) == 0
    assert json.loads(capsys.readouterr().out)["clips_per_rank"] == 4
    assert fastvid_command([*own, "sync_options.shares=1"]) == 2
    assert "no option 'shares'" in capsys.readouterr().err
    # No files were created, and a truncated shard is named.
    assert not (tmp_path / "dry").exists()
    copy = tmp_path / "shards"
    shutil.copytree(folder / "shards", copy)
    tar = min(copy.glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-512])
    assert fastvid_command([*words, f"data.path={copy}", "--dry-run"]) == 1
    assert tar.name in capsys.readouterr().err


def test_videos_in_place_pass_a_dry_run_and_are_trained_on_by_a_sweep(folder, tmp_path, monkeypatch, capsys):
    labels = tmp_path / "labels.csv"
    rows = [f"{clip.name},{clip.stem},{'val' if clip.stem == '0' else 'train'}\n" for clip in folder.glob("*.mp4")]
    labels.write_text("path,label,split\n" + "".join(rows))
    index_videos(str(folder), tmp_path / "set", annotations=f"csv:{labels}", proof="none", workers=1)
    config = small.config(tmp_path / "set", tmp_path / "out", global_batch_size=1)
    monkeypatch.setenv("FASTVID_TOKEN", "0123456789abcdef")
    assert dry_run.check([config])[0]["shards"] == 1
    assert launch.start([replace(config, sync="relay")]) == 0
    assert (tmp_path / "out" / "results.json").exists()
    assert "next: " not in capsys.readouterr().out  # `fastvid report` and `weights` take no sweeps


class Asks(nn.Linear):
    """A net that looks at the values of its clips, which the meta device does not have. It has an output too many."""

    def __init__(self, num_classes, **_options):
        super().__init__(3, num_classes + 1)

    def forward(self, video):
        assert video.isfinite().all()
        return super().forward(video.mean((2, 3, 4)))


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ("data.group_size=2 model.ghost_norm=true", 1),
        ("data.group_size=4 data.global_batch_size=12 run.micro_batch_size=6", 3),
        (f"model.name={__name__}:Asks run.micro_batch_size=3", 2),
    ],
)
def test_a_dry_run_passes_groups_together_and_any_model(folder, tmp_path, capsys, change, passes):
    words = ["train", str(folder / "recipe.py"), f"run.out={tmp_path}", *change.split()]
    assert fastvid_command([*words, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["micro_batches"] == passes
    assert ("memory_gib" in found) == ("Asks" not in change)


def test_outputs_of_another_number_than_classes_have_numbers(folder, tmp_path, capsys):
    words = [str(folder / "recipe.py"), f"run.out={tmp_path}", "run.epochs=1", f"model.name={__name__}:Asks"]
    for command in (
        ["train", *words, "--json"],
        ["eval", *words, "--json"],
        ["predict", *words, str(folder / "0.mp4"), "--json"],
    ):
        assert fastvid_command(command) == 0
    _, scored, predicted = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert [row["class"] for row in scored["classes"]] == ["0", "1", "2"]
    assert {row["class"] for row in predicted["top"]} == {"0", "1", "2"}


def test_a_run_stopped_by_sigterm_writes_a_checkpoint_and_resumes(folder):
    out = folder / "terminated"
    changes = [f"run.out={out}", "run.epochs=1000", "run.eval_every_epochs=1000", "run.checkpoint_every_s=1000"]
    process = forks.Command("fastvid.train", folder / "recipe.py", *changes)
    rows = out / "metrics.jsonl"
    until(lambda: rows.exists() and metrics.curve(metrics.read(rows)), 250)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    last = metrics.curve(metrics.read(rows))[-1]
    state = toy.newest(out)
    assert state["replica"]["samples"] == last["samples"] == json.loads((out / "summary.json").read_text())["samples"]
    # Resumed in this process, the current epoch is finished, and with it the run.
    epochs = state["loader"]["epoch"] + 1
    assert launch.train(recipes.load(str(folder / "recipe.py"), [*changes[:1], f"run.epochs={epochs}"])) == 0
    assert toy.newest(out)["replica"]["samples"] == epochs * TRAIN


def test_another_machine_resumes_from_checkpoints_in_an_object_store(folder, s3):
    store = f"s3://{s3.bucket()}/run"
    for number, epochs in enumerate((1, 2)):
        out = folder / f"machine-{number}"
        changes = [f"run.out={out}", f"run.checkpoints={store}", f"run.epochs={epochs}", "optim.warmup_epochs=0"]
        assert launch.train(recipes.load(str(folder / "recipe.py"), changes)) == 0
        assert not (out / "checkpoints").exists()
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["samples"] for row in rows if row["kind"] == "start"] == [TRAIN]
    assert Checkpoints(store).newest_samples() == 2 * TRAIN


def test_labels_can_come_from_another_column_and_an_epoch_without_an_average_has_a_row_of_metrics(folder):
    changes = [f"run.out={folder / 'picture'}", "data.label=picture", "model.num_classes=4", "run.epochs=1"]
    changes += ["model.channels_last=true", "run.amp=bf16", "run.micro_batch_size=3", "sync=kavg"]
    assert launch.train(recipes.load(str(folder / "recipe.py"), changes)) == 0
    assert toy.newest(folder / "picture")["replica"]["model"]["backbone.fc.weight"].shape == (4, 64)
    assert [row["samples"] for row in metrics.curve(metrics.read(folder / "picture/metrics.jsonl"))] == [TRAIN]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (["data.label=gap", "model.num_classes=40"], UsageError, "1 of 24 samples have no label from 0 to 39"),
        (["data.label=picture"], UsageError, "12 of 24 samples have no label from 0 to 1"),
        (["data.label=picture"], UsageError, 'set data.where="picture BETWEEN 0 AND 1"'),
        (["run.amp=fp16"], UsageError, "run.amp is 'fp16'"),
        (["run.resume=false", "run.out={done}"], UsageError, "run.out already contains a run"),
        (["optim.groups=tsm", "run.out={done}"], StateError, "checkpoint does not fit"),
        (["run.seed=1", "model.options.width=16", "run.out={done}"], StateError, "checkpoint does not fit"),
        (
            ["data.frames.num_segments=4", "data.eval_frames.num_segments=4", "run.out={done}"],
            StateError,
            "another sampler",
        ),
        (["sync=kavg", "run.out={done}"], StateError, "written with sync=ddp, this run uses sync=kavg"),
        (["optim.name=lars", "run.out={done}"], StateError, "with optim.name=sgd, this run uses optim.name=lars"),
        (["run.out=s3://bucket/run"], UsageError, "expected a local folder"),
        (["run.checkpoints=/dev/null/run"], FastvidError, "/dev/null"),
    ],
)
def test_errors_are_raised_before_the_first_step(folder, undisturbed, tmp_path, changes, kind, message):
    filled = [f"run.out={tmp_path}", *(change.format(done=undisturbed) for change in changes)]
    keys = [change.partition("=")[0] for change in filled]
    filled = [change for index, change in enumerate(filled) if keys[index] not in keys[index + 1 :]]
    depends_on_the_device = "run.amp" in message
    for start in (dry_run.check, lambda configs: launch.train(*configs))[depends_on_the_device:]:
        with pytest.raises(kind) as error:
            start([recipes.load(str(folder / "recipe.py"), filled)])
        assert message in str(error.value)
    assert not (tmp_path / "metrics.jsonl").exists() or not metrics.curve(metrics.read(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sync=kavgg", "unknown sync 'kavgg'"),
        ("sync=kavg sync_options.period=none", "period is"),
        ("sync=asgd sync_options.server=127.0.0.1:29600", "sync option server needs a token"),
        ("sync=asgd optim.name=lars", "optim.name=lars, which is not element-wise"),
        ("optim.freeze=nopeprefix", "matches no parameter"),
        ("data.decoder=nosuch", "nosuch"),
        ("data.frames.num_segments=0 data.eval_frames.num_segments=0", "num_segments"),
        ("data.group_size=3", "group"),
        ("model.weights=nowhere.pt", "cannot read the checkpoint"),
        ("sync=relay", "fewer than"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(folder, tmp_path, capsys, change, message):
    """Both end with the same message and exit code, and leave nothing behind."""
    words = ["train", str(folder / "recipe.py"), f"run.out={tmp_path / 'out'}", *change.split()]
    # The run itself is started with the most that one process can be.
    alone = change != "sync=relay" and "group_size=3" not in change
    found = set()
    for command in ([*words, "--dry-run", "--world", "1" if alone else "4"], *([words] if alone else [])):
        found.add((fastvid_command(command), capsys.readouterr().err))
    ((code, text),) = found
    assert code in (1, 2)
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "out" / "sweep.json").exists()


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_a_dry_run_knows_what_every_optimizer_stores(name):
    weights = nn.Linear(64, 64, bias=False)
    config = OptimConfig(base_lr=0.1, base_batch_size=1, name=name)
    optimizer = make_optimizer(weights, config)
    weights(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    stored = sum(value.numel() for value in optimizer.state[weights.weight].values() if value is not None)
    assert stored // weights.weight.numel() == state_per_weight(config)
