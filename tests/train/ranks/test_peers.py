"""The end of a rank is named on the others; ranks end with torchrun's agent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.common.ports import reserved_port
from fastvid.train.ranks import Peers, own_record
from tests import forks

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("how", "said"),
    [("kill", "has died"), ("raise", "failed with LookupError: the shelf is empty"), ("stop", "is stopped")],
)
def test_a_rank_that_ends_is_named_on_every_other_rank(tmp_path: Path, how: str, said: str) -> None:
    world = 3
    with reserved_port() as port:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        ranks = [
            forks.start("tests.train.ranks.dying", tmp_path, how, RANK=str(rank), **shared) for rank in range(world)
        ]
        try:
            assert [forks.wait(rank) for rank in ranks[:-1]] == [1, 1]
        finally:
            ranks[-1].kill()
    for rank in range(world - 1):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert text.startswith(f"WorkerError: rank {rank} cannot continue: rank 2, process {ranks[2].pid} on ")
        assert said in text
        assert "hint: see what rank 2 printed" in text


class _Store:
    """A job's store, where a rank tells why it ends, and ends, just after it has been asked for the first time."""

    def __init__(self, process: subprocess.Popen[bytes], key: str, told: bytes) -> None:
        self._process, self._key, self._told, self.values = process, key, told, dict[str, bytes]()

    def check(self, keys: list[str]) -> bool:
        found = all(key in self.values for key in keys)
        if keys == [self._key] and not found:
            self.values[self._key] = self._told
            self._process.kill()
            self._process.wait()
        return found

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()


def test_a_rank_that_ends_while_it_is_asked_is_not_the_cause() -> None:
    victim, witness = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        victim.kill()
        victim.wait()
        here = json.loads(own_record())
        records = [json.dumps(here | {"pid": pid}).encode() for pid in (os.getpid(), witness.pid, victim.pid)]
        told = json.dumps({"lost": {"2": "rank 2 has died"}}).encode()
        store = _Store(witness, "fastvid/ended/1", told)
        error = Peers(0, records, store).explain(RuntimeError("gloo: connection closed by peer"))  # type: ignore[arg-type]
        assert "rank 1" not in str(error)
        assert "see what rank 2 printed" in str(error)
    finally:
        for process in (victim, witness):
            process.kill()
            process.wait()


WORKER = """
import os, signal, sys, time
from pathlib import Path
from fastvid.train.ranks import ending_with_agent
from fastvid.train.ranks import StopSignal, join

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
with join(60) as member:
    with StopSignal() as stop:
        if rank == "0":
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            while not stop.requested:
                time.sleep(0.05)
            (folder / "stopped").write_text("gracefully")
            os._exit(0)
        # A rank that ignores the signal, like one that hangs in native code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with ending_with_agent(grace_s=0.5):
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            time.sleep(1000)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_ranks_end_when_torchruns_agent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen([*command, str(script), str(tmp_path)], env=environment)
    deadline = time.monotonic() + 250
    files, pids = [tmp_path / f"{rank}.pid" for rank in range(2)], list[int]()
    try:
        while not all(file.exists() and file.read_text() for file in files):
            assert agent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids = [int(file.read_text()) for file in files]
        assert all(map(runs, pids))
        agent.kill()
        agent.wait()
        while any(map(runs, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        agent.kill()
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)
    assert (tmp_path / "stopped").read_text() == "gracefully"
