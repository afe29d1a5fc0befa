"""Checkpoints: written atomically, verified, and loadable with plain torch."""

import hashlib
import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastvid.errors import FormatError, StateError, StorageError, UsageError, VersionError
from fastvid.train.records.checkpoint import BEST, Checkpoints, decode, evaluated_weights

STATE = {"replica": {"weight": torch.arange(1000.0)}, "lineage": [{"epoch": 0, "samples": 8}], "step": 3}


def save_many(folder, *samples, keep=3):
    checkpoints = Checkpoints(str(folder), keep=keep)
    for count in samples:
        checkpoints.save({**STATE, "samples": count}, count)
    return checkpoints


def state_of(checkpoints):
    found = checkpoints.newest()
    assert found is not None
    return decode(found.data, found.name)


def newest(checkpoints):
    return int(state_of(checkpoints)["samples"])


def samples_of(checkpoints):
    return [int(name.split("-")[1]) for name in checkpoints.names()]


def test_saved_state_is_read_back_from_a_file_named_after_its_samples_and_hash(tmp_path):
    checkpoints = save_many(tmp_path, 12_288)
    (name,) = checkpoints.names()
    state = state_of(checkpoints)
    assert torch.equal(state["replica"]["weight"], STATE["replica"]["weight"])
    assert state["lineage"] == STATE["lineage"]
    # Plain torch can also read the file, without unpickling.
    plain = torch.load(tmp_path / name, weights_only=True)
    assert (plain["step"], plain["version"]) == (3, 1)
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert name == f"checkpoint-000000012288-{digest[:16]}.pt"
    assert checkpoints.newest_samples() == 12_288
    # Another one of the same samples replaces it.
    checkpoints.save({**STATE, "step": 4}, 12_288)
    assert (samples_of(checkpoints), state_of(checkpoints)["step"]) == ([12_288], 4)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_checkpoint_is_logged_and_the_previous_one_used(tmp_path, caplog, damage):
    checkpoints = save_many(tmp_path, 8, 16)
    name = checkpoints.names()[-1]
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes({"flip": bytes(data), "cut": bytes(data[:-7]), "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert newest(checkpoints) == 8
    assert name in caplog.text
    with pytest.raises(FormatError, match="does not match its checksum"):
        checkpoints.read(name)

    for other in checkpoints.names():
        (tmp_path / other).write_bytes(b"gone")
    with pytest.raises(StateError, match="none of 2 checkpoints is intact"):
        checkpoints.newest()


def test_loading_does_not_execute_a_pickle(tmp_path):
    marker = tmp_path / "executed"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    path = tmp_path / "trap.pt"
    torch.save({"version": 1, "trap": Trap()}, path)
    with pytest.raises(FormatError, match="not a fastvid checkpoint"):
        decode(path.read_bytes(), path.name)
    assert not marker.exists()
    # Positive control: the exploit works with unguarded loading.
    torch.load(path, weights_only=False)
    assert marker.exists()


def test_a_checkpoint_stays_loadable_over_50_kills_during_writes(tmp_path):
    command = [sys.executable, "-m", "tests.train.records.killing", str(tmp_path), "50", "0"]
    result = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["kills"], found["lost"], found["unreadable"]) == (50, 0, 0)
    # Otherwise the kills would prove little.
    assert found["inside_a_write"] > 5


def test_state_may_be_modified_while_it_is_written(tmp_path):
    checkpoints, weight = Checkpoints(str(tmp_path)), torch.ones(2_000_000)
    checkpoints.begin({"replica": {"weight": weight}, "lineage": [(1, 2)]}, 8)
    weight.zero_()
    checkpoints.wait()
    state = state_of(checkpoints)
    assert bool((state["replica"]["weight"] == 1).all())
    assert state["lineage"] == [(1, 2)]


def test_a_failed_write_is_raised_by_wait(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path))

    def full(state, samples):
        raise StorageError("no space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    checkpoints.begin({"samples": 8}, 8)
    with pytest.raises(StorageError, match="no space"):
        checkpoints.begin({"samples": 16}, 16)
    checkpoints.wait()


def test_the_average_is_evaluated_if_there_is_one():
    model, average = {"a": 1, "b": 2}, {"a": 3}
    assert evaluated_weights({"replica": {"model": model, "average": average}}) == {"a": 3, "b": 2}
    assert evaluated_weights({"replica": {"model": model, "average": None}}) == model
    assert evaluated_weights({"replica": {"model": model}}) == model


def test_the_best_checkpoint_is_kept_in_addition_to_the_newest(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    assert (checkpoints.best(), checkpoints.find()) == (None, None)
    with pytest.raises(UsageError, match="no best checkpoint"):
        checkpoints.find("best")
    noted = []
    for samples, score in ((8, 30.0), (16, 50.0), (24, 50.0), (32, math.nan), (40, 49.0)):
        checkpoints.save({"samples": samples}, samples)
        noted.append(checkpoints.note(samples, score))
    assert noted == [True, True, False, False, False]
    assert samples_of(checkpoints) == [16, 32, 40]
    found = [checkpoints.find(name) for name in (None, "best", checkpoints.names()[1])]
    assert [int(one.name.split("-")[1]) for one in found if one is not None] == [40, 16, 32]
    best = Checkpoints(str(tmp_path)).best()
    assert best is not None
    assert best[0].startswith("checkpoint-000000000016-")
    assert best[1] == 50.0
    # A better checkpoint replaces it, so it may be deleted.
    checkpoints.save({"samples": 48}, 48)
    assert checkpoints.note(48, 60.0)
    checkpoints.save({"samples": 56}, 56)
    assert samples_of(checkpoints) == [48, 56]


def test_other_files_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    assert checkpoints.newest_samples() == -1
    assert checkpoints.newest() is None
    others = ["checkpoint-notes.pt", "checkpoint-000000000099-0123456789abcde.pt", "checkpoint-99-0123456789abcdef.pt"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    assert checkpoints.names() == []
    save_many(tmp_path, 8, 16, keep=1)
    assert checkpoints.newest_samples() == newest(checkpoints) == 16
    assert all((tmp_path / name).read_bytes() == b"mine" for name in others)
    for name in others:
        with pytest.raises(FormatError, match=r"file name is not checkpoint-SAMPLES-SHA256\.pt or best"):
            checkpoints.read(name)


def test_a_checkpoint_that_is_scored_again_has_its_last_score(tmp_path):
    checkpoints = save_many(tmp_path, 8, 16)
    assert checkpoints.note(16, 50.0)
    assert checkpoints.note(16, 40.0)
    assert not checkpoints.note(8, 39.0)
    assert not checkpoints.note(24, 99.0)  # there is no such checkpoint
    best = checkpoints.best()
    assert best == (checkpoints.names()[1], 40.0)
    assert json.loads((tmp_path / "best.json").read_text()) == {"name": best[0], "score": 40.0, "samples": 16}
    (tmp_path / best[0]).unlink()
    assert checkpoints.best() is None
    assert checkpoints.note(8, 1.0)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", {"weight": 1}, [1, 2], torch.ones(2), {"version": 2}])
def test_other_bytes_and_a_file_of_torch_of_no_or_another_version_are_no_checkpoint(content):
    buffer = io.BytesIO(content if isinstance(content, bytes) else b"")
    if not isinstance(content, bytes):
        torch.save(content, buffer)
    kind, message = FormatError, r"not a fastvid checkpoint.*file=x\.pt"
    if content == {"version": 2}:
        kind, message = VersionError, "version 2, this fastvid reads 1"
    with pytest.raises(kind, match=message):
        decode(buffer.getvalue(), "x.pt")


def test_an_object_store_keeps_newest_and_best_and_skips_damaged_checkpoints(s3, caplog):
    checkpoints = Checkpoints(f"s3://{s3.bucket()}/some run/checkpoints", keep=2)
    assert checkpoints.newest() is None
    for count in (8, 16, 24, 32):
        checkpoints.begin({**STATE, "samples": count}, count)
        checkpoints.wait()
        if count == 8:
            assert checkpoints.note(8, 61.5)
    checkpoints.prepare()
    assert samples_of(checkpoints) == [8, 24, 32]
    assert newest(checkpoints) == 32
    last = checkpoints.names()[-1]
    data = bytearray(checkpoints.storage.read(last))
    data[len(data) // 2] ^= 1
    checkpoints.storage.write(last, bytes(data))
    assert newest(checkpoints) == 24
    assert last in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b'{"name": "check', b"null", b"[]", b'{"name": "x"}', b'{"name": "x", "score": "y"}']
)
def test_a_damaged_record_of_the_best_stops_no_save_and_no_checkpoint_is_lost_until_it_is_replaced(
    tmp_path, caplog, content
):
    checkpoints = save_many(tmp_path, 8, 16, keep=1)
    checkpoints.note(16, 50.0)
    (tmp_path / BEST).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for samples in (24, 32):
            checkpoints.save({**STATE, "samples": samples}, samples)
    assert len(checkpoints.names()) == 3  # 16, which may be the best, is still there
    assert BEST in caplog.text
    with pytest.raises(FormatError, match="record of the best checkpoint cannot be read") as error:
        checkpoints.best()
    assert error.value.hint is not None
    assert checkpoints.note(32, 40.0)
    assert checkpoints.best() == (checkpoints.names()[-1], 40.0)
    checkpoints.save({**STATE, "samples": 40}, 40)
    assert samples_of(checkpoints) == [32, 40]
