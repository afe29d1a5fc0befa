"""A worker process with a malformed answer is killed, its clip is named, and nothing that it sent is executed."""

import multiprocessing
import os
import pickle

import pytest
import torch

from fastvid.decode.backends import Backend
from fastvid.errors import ChecksumError, FormatError, WorkerError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import Codec
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.stats import Counters
from fastvid.load.workers.worker_process import Answer
from fastvid.runtime import processes
from tests.datasets import make_clip, pack
from tests.load import troubled
from tests.load.loaders import clip_loader


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six clips; for the third, the worker sends something else than an answer."""
    path = tmp_path_factory.mktemp("answers")
    data = make_clip(path / "clip.mp4", frames=20)
    pack(path / "set", [[(key, data, 0) for key in ("a", "b", "sends", "c", "d", "e")]])
    return path / "set"


def make(folder, **options):
    decoder = Backend("troubled", "tests.load.troubled:TroubledDecoder", "cpu", frozenset(Codec), "nothing")
    standard = {"frames": Segments(4), "spatial": CenterCrop(32), "global_batch_size": 6, "shuffle": False}
    standard |= {"num_threads": 1, "dtype": torch.uint8, "workers": "process"}
    return clip_loader(Dataset(str(folder)), decoder=decoder, **standard | options)


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def as_connections_send(data):
    """Return the bytes that `multiprocessing.connection.Connection.send` sends for the pickle `data`."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        theirs.send_bytes(data)
        return os.read(ours.fileno(), 1 << 16)


def received_by_a_connection(data):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        os.write(theirs.fileno(), data)
        return ours.recv()


@pytest.mark.parametrize(
    ("wrapped", "unwrapped"),
    [
        (as_connections_send, received_by_a_connection),
        (lambda bomb: bomb + bytes(100), pickle.loads),
        (
            lambda bomb: processes.pack({"made": [], "costs": []}, bomb),
            lambda piece: pickle.loads(processes.unpack(piece)[1]),
        ),
    ],
    ids=["connection", "bare", "blob"],
)
def test_a_worker_that_sends_a_pickle_is_killed_and_nothing_is_unpickled(
    folder, wrapped, unwrapped, tmp_path, monkeypatch, caplog
):
    sent = tmp_path / "sent"
    sent.write_bytes(wrapped(pickle.dumps(Bomb(tmp_path / "exploded"))))
    monkeypatch.setenv(troubled.SENDS, str(sent))
    loader = make(folder, on_error="skip")
    lost = [key for batch in loader for key, valid in zip(batch.key, batch.valid, strict=True) if not valid]
    assert lost == ["sends"]
    assert loader.stats.total.skips == {"WorkerError": 1}
    assert "sent a malformed answer and was killed" in caplog.text
    assert not (tmp_path / "exploded").exists()
    unwrapped(sent.read_bytes())  # the control: a parent that unpickles these bytes executes them
    assert (tmp_path / "exploded").exists()


def test_worker_with_an_incomplete_answer_is_killed(folder, tmp_path, monkeypatch):
    sent = tmp_path / "sent"
    sent.write_bytes(Answer([], Counters()).to_bytes())
    monkeypatch.setenv(troubled.SENDS, str(sent))
    loader = make(folder)
    with pytest.raises(WorkerError, match="did not answer for every clip and was killed"):
        list(loader)


def test_answers_round_trip_and_invalid_ones_are_refused():
    made = [(1, None), (0, ChecksumError("bad", key="x", packet=3))]
    header, _ = processes.unpack(Answer(made, Counters(clips=1, fetch_seconds=0.1)).to_bytes())
    answer = Answer.from_header(header, 2, pid=7)
    assert answer.costs == Counters(clips=1, fetch_seconds=0.1)
    assert [number for number, _ in answer.made] == [1, 0]
    assert str(answer.made[1][1]) == "bad [key=x, packet=3]"
    (first, second), costs = header["made"], header["costs"]
    for wrong in (
        {"made": [first]},
        {"made": [first, first], "costs": costs},
        {"made": [[2, None, ""]], "costs": costs},
        {"made": [[0, None]], "costs": costs},
        {"made": [[0, {**second[1], "kind": "SystemExit"}, ""]], "costs": costs},
        {"made": [[0, {**second[1], "kind": "open", "args": ["x"]}, ""]], "costs": costs},
        {"made": [[0, {**second[1], "message": 1}, ""]], "costs": costs},
        {"made": [[0, {**second[1], "where": {"hint": 1}}, ""]], "costs": costs},
        {"made": 1, "costs": costs},
        {"made": [first], "costs": costs[:-1]},
        {"made": [first], "costs": [*costs[:-1], "1"]},
    ):
        with pytest.raises(FormatError):
            Answer.from_header(wrong, 2, pid=7)
