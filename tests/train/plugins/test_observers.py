"""Loggers and callbacks: what they receive, and what happens when one fails."""

import importlib
import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastvid.errors import FastvidError, MissingDependency
from fastvid.train.records.loggers import TensorBoard, Wandb
from fastvid.train.records.records import METRICS_FILE, Callback, Logger, Observers, Recorder, RunInfo, observers, read
from tests.skips import soak_but
from tests.train import toy

SUMMARY = {"over": True, "samples": 16, "eval": {"loss": 0.5}, "lineage": []}
CONFIG = {"optim": {"base_lr": 0.25}, "run": {"epochs": 2}}


def record(folder, logger, *rows):
    """Leave what a run leaves: a start, rows with one number, a summary."""
    loggers = Observers("run.loggers", {"it": logger})
    recorder = Recorder(folder / METRICS_FILE, loggers)
    loggers.call("start", RunInfo(folder, CONFIG, 0, 1, 0, toy.net()))
    recorder.write("start", samples=rows[0][0], world_size=1)
    for samples, loss in rows:
        recorder.write("train", samples=samples, loss=loss, checkpoint="x")
    recorder.write("train", samples=rows[-1][0] + 8, loss=float("nan"))
    recorder.close()
    loggers.call("finish", SUMMARY)


def test_tensorboard_receives_all_rows(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, TensorBoard(), (8, 0.5), (16, 0.25))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(8, 0.5), (16, 0.25)]


def offline(folder):
    """Return the records of each offline run of wandb in a folder, by kind, in the order in which they started."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        rows = {"id": path.stem.removeprefix("run-"), "config": {}, "rows": [], "summary": {}}
        for data in transaction_log(path.read_bytes()):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(data)
            if entry.HasField("history"):
                rows["rows"].append(values(entry.history.item))
            rows["config"] |= values([*entry.run.config.update, *entry.config.update])
            rows["summary"] |= values(entry.summary.update)
        found.append(rows)
    return found


def transaction_log(data):
    """Yield the records of a file: LevelDB's log format after a head of seven bytes, in blocks of 32 KiB."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)  # after a checksum
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield parts
            parts = b""


def values(items):
    named = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {name: value for name, value in named.items() if not name.startswith("_")}


def test_wandb_receives_config_rows_and_summary_and_a_resumed_run_continues(tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "SILENT": "true", "DISABLE_CODE": "true", "DISABLE_GIT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    record(tmp_path, Wandb(), (8, 0.5), (16, 0.25))
    record(tmp_path, Wandb(), (16, 0.125))
    importlib.import_module("wandb").teardown()  # ends its process, which writes the files
    first, second = offline(tmp_path)
    assert first["id"] == second["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert first["config"] == CONFIG
    curves = [
        [(row["samples"], row["train/loss"]) for row in one["rows"] if "train/loss" in row] for one in (first, second)
    ]
    assert curves == [[(8, 0.5), (16, 0.25)], [(16, 0.125)]]
    assert {name: first["summary"][name] for name in ("over", "samples", "eval")} == {
        "over": True, "samples": 16, "eval": {"loss": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "module", "package"), [(TensorBoard, "torch.utils.tensorboard", "tensorboard"), (Wandb, "wandb", "wandb")]
)
def test_a_missing_package_names_the_extra(kind, module, package, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency) as error:
        kind()
    assert f"fastvid-toolkit[{package}]" in str(error.value)


class Seen(Callback):
    """Notes its calls in the folder of the run, one file a rank; fails where the file ``fail`` says so."""

    def on_start(self, run):
        self.path = run.out / f"seen-{run.rank}"
        self.fail = (run.out / "fail").read_text().split() if (run.out / "fail").exists() else []
        self.rank = run.rank
        self.note("start", run.samples)

    def note(self, what, value):
        with self.path.open("a") as file:
            file.write(f"{what} {value}\n")
        if self.fail == [what, str(self.rank)]:
            raise RuntimeError("it broke")

    def on_step(self, row):
        self.note("step", row["samples"])

    def on_eval(self, row):
        self.note("eval", row["samples"])

    def on_checkpoint(self, samples):
        self.note("checkpoint", samples)

    def on_end(self, summary):
        self.note("end", summary["samples"])


def needs_argument(what):
    return Seen()


def makes_something_else():
    return {}


def test_wrong_loggers_and_callbacks_are_named():
    base = toy.toy_config(Path()).run
    for changes, message, hint in (
        ({"loggers": ("tensorbord",)}, "run.loggers has 'tensorbord'", "did you mean tensorboard?"),
        ({"loggers": ("wandb", "wandb")}, "'wandb' more than once", "name it once"),
        ({"loggers": "wandb"}, "run.loggers is 'wandb', expected a tuple", "write ('wandb',)"),
        ({"callbacks": ("Seen",)}, "run.callbacks has 'Seen'", "write it as module:name"),
    ):
        with toy.refused(message, hint):
            replace(base, **changes)
    for name, message, hint in (
        ("Sean", "has no 'Sean'", "did you mean Seen?"),
        ("needs_argument", "requires what", ""),
        ("makes_something_else", "is a dict", "derive its class from fastvid.train.Callback"),
        ("SUMMARY", "is not callable", "name a class"),
    ):
        with toy.refused(message, hint):
            observers("run.callbacks", [f"{__name__}:{name}"], Callback, {})


def test_a_callback_is_called_on_every_rank_at_the_same_points(tmp_path):
    assert toy.spawn(2, tmp_path, "seen", module="tests.train.plugins.ranks") == [0, 0]
    first, second = ((tmp_path / "seen" / f"seen-{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    steps = toy.NUM_SAMPLES // toy.BATCH
    ends = [epoch * steps * toy.BATCH for epoch in range(1, toy.EPOCHS + 1)]
    expected = ["start 0"]
    for epoch, end in enumerate(ends, 1):
        expected += [f"step {samples}" for samples in range(end - (steps - 1) * toy.BATCH, end + 1, toy.BATCH)]
        expected += [f"checkpoint {end}"]
        expected += [f"eval {end}"] if epoch in (2, 4, toy.EPOCHS) else []
    assert first == [*expected, f"end {ends[-1]}"]


@pytest.mark.parametrize("where", soak_but(["step 1", "checkpoint 0", "eval 1"], "step 1", "checkpoint 0"))
def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(tmp_path, where):
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "fail").write_text(where)
    # Returns, although the other rank waits for numbers of this one; each says why.
    codes = toy.spawn(2, tmp_path, "seen", module="tests.train.plugins.ranks")
    assert 0 not in codes
    method, rank = where.split()
    message = (tmp_path / f"error-{rank}").read_text()
    assert f"run.callbacks 'seen' failed in on_{method}: RuntimeError: it broke" in message


class Broken(Logger):
    def write(self, kind, row):
        raise OSError("no network")


def test_a_logger_that_fails_is_named_after_the_row_is_written(tmp_path):
    recorder = Recorder(tmp_path / METRICS_FILE, Observers("run.loggers", {"my:Broken": Broken()}))
    with pytest.raises(FastvidError, match=r"run\.loggers 'my:Broken' failed in write: OSError: no network"):
        recorder.write("train", samples=8, loss=0.5)
    recorder.close()
    assert [row["loss"] for row in read(tmp_path / METRICS_FILE)] == [0.5]
