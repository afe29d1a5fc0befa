"""The end of a rank is named on the others; ranks end with torchrun's agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.common.ports import reserved_port
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


WORKER = """
import os, signal, sys, time
from pathlib import Path
from fastvid.train.ranks.agent import ending_with_agent
from fastvid.train.ranks.elastic import StopSignal, join

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
