"""Ranks find each other, name the one that ended, and end with torchrun's agent."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from bench.common.ports import reserved_port
from fastvid.errors import UsageError, WorkerError
from fastvid.runtime.processes import World
from fastvid.train.__main__ import main as train_main
from fastvid.train.ranks import UNSHARED_STORE, Peers, StopSignal, check_rendezvous, fresh_store, own_record
from tests import forks
from tests.load.tools import until

SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
LINE = f"export {UNSHARED_STORE}=1"


@pytest.mark.parametrize(
    ("command", "environment", "safe"),
    [
        ("torchrun --nnodes 1:4 -m fastvid.train x", SHARED, False),
        ("python -m torch.distributed.run --nnodes=2:8 train.py", SHARED, False),
        ("torchrun --nn 1:2 x", SHARED, False),
        ("torchrun train.py", SHARED | {"PET_NNODES": "1:4"}, False),
        ("", SHARED | {"PET_NNODES": "1:4"}, False),
        ("torchrun --nnodes 1:4 x", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, True),
        ("torchrun --nnodes 4 x", SHARED, True),
        ("torchrun --nnodes 4:4 x", SHARED, True),
        ("torchrun --nproc-per-node 2 x", SHARED, True),
        ("torchrun --nnodes 2 x", SHARED | {"PET_NNODES": "1:4"}, True),  # the flag wins over the variable
        ("", {}, True),
    ],
)
def test_an_elastic_worker_without_the_variable_fails_with_the_line_to_add(command, environment, *, safe):
    with contextlib.nullcontext() if safe else pytest.raises(UsageError) as error:
        check_rendezvous(environment, command.split())
    assert safe or LINE in (error.value.hint or "")
    (told,) = re.findall(r"stops with `(.*)`", (forks.ROOT / "docs" / "troubleshooting.md").read_text())
    assert safe or told in error.value.message


def test_node_range_and_variable_are_detected_under_torchrun(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\n"
        "from fastvid.errors import UsageError\n"
        "from fastvid.train.ranks import agent_command, check_rendezvous\n"
        "try:\n"
        "    check_rendezvous(os.environ, agent_command())\n"
        "    print('went on', flush=True)\n"
        "except UsageError as error:\n"
        "    print('stopped:', error.hint, flush=True)\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "last_call_timeout=1", str(script)]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name != UNSHARED_STORE} | {"PYTHONPATH": str(root)}
    agents = [
        subprocess.Popen(command, env=clean | variable, stdout=subprocess.PIPE, text=True)
        for variable in ({}, {UNSHARED_STORE: "1"})
    ]
    without, with_it = (agent.communicate(timeout=300)[0].strip() for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0]
    assert without.startswith("stopped:")
    assert LINE in without
    assert with_it == "went on"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_recorded_and_handlers_are_restored(number):
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.received == number
        # A second signal has its original effect.
        assert {s: signal.getsignal(s) for s in before} == before
    assert {s: signal.getsignal(s) for s in before} == before


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("how", "said"),
    [("kill", "has died"), ("raise", "failed with LookupError: the shelf is empty"), ("stop", "is stopped")],
)
def test_a_rank_that_ends_is_named_on_every_other_rank(tmp_path, how, said):
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

    def __init__(self, process, key, told):
        self._process, self._key, self._told, self.values = process, key, told, dict[str, bytes]()

    def check(self, keys):
        found = all(key in self.values for key in keys)
        if keys == [self._key] and not found:
            self.values[self._key] = self._told
            self._process.kill()
            self._process.wait()
        return found

    def get(self, key):
        return self.values[key]

    def set(self, key, value):
        self.values[key] = value.encode()


def test_a_rank_that_ends_while_it_is_asked_is_not_the_cause():
    victim, witness = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        victim.kill()
        victim.wait()
        here = json.loads(own_record())
        records = [json.dumps(here | {"pid": pid}).encode() for pid in (os.getpid(), witness.pid, victim.pid)]
        told = json.dumps({"lost": {"2": "rank 2 has died"}}).encode()
        store = _Store(witness, "fastvid/ended/1", told)
        error = Peers(0, records, store).explain(RuntimeError("gloo: connection closed by peer"))
        assert "rank 1" not in str(error)
        assert "see what rank 2 printed" in str(error)
    finally:
        for process in (victim, witness):
            process.kill()
            process.wait()


STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(600)
"""


@pytest.mark.parametrize("error", [RuntimeError("gloo: timed out"), UsageError("no column 'x'")])
def test_a_rank_whose_store_is_out_of_reach_says_so_and_does_not_wait_for_it(error, monkeypatch):
    """As when the host of rank 0 is cut off from the network: what is sent to it is never answered."""
    monkeypatch.setattr("fastvid.train.ranks._SILENCE_S", 0.5)
    with reserved_port() as port:
        server = forks.start("-c", STORE, port)
        store = TCPStore("127.0.0.1", port, is_master=False)
    peers = Peers(1, [own_record()] * 2, store)
    server.send_signal(signal.SIGSTOP)
    try:
        said = str(peers.explain(error))
    finally:
        server.kill()
    assert said == str(error) or "rank 1 cannot continue: another rank does not answer: gloo: timed out" in said


def test_an_error_of_all_ranks_is_left_to_the_first_one_to_print(monkeypatch, capsys):
    store = HashStore()
    first, second = (Peers(rank, [own_record()] * 2, store) for rank in range(2))
    same = [UsageError("no column 'x'", hint="use y") for _ in range(2)]
    other = UsageError("local rank 1 has no GPU")
    assert [peers.explain(error) for peers, error in zip((first, second), same, strict=True)] == same
    second.explain(other)
    assert [error.is_told for error in (*same, other)] == [False, True, False]

    for error, lines in ((same[0], 2), (same[1], 0), (other, 1)):
        monkeypatch.setattr("fastvid.train.__main__.start", Mock(side_effect=error))
        assert train_main(["motion_tsm"]) == 2
        assert capsys.readouterr().err.count("\n") == lines


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


def runs(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def test_ranks_end_when_torchruns_agent_is_killed(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen([*command, str(script), str(tmp_path)], env=environment)
    files, pids = [tmp_path / f"{rank}.pid" for rank in range(2)], list[int]()
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files), 250)
        pids = [int(file.read_text()) for file in files]
        assert all(map(runs, pids))
        agent.kill()
        agent.wait()
        until(lambda: not any(map(runs, pids)), 250)
    finally:
        agent.kill()
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)
    assert (tmp_path / "stopped").read_text() == "gracefully"


@pytest.fixture
def agent():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(agent):
    return TCPStore("127.0.0.1", agent.port, is_master=False)


def attempt(agent, world, *, missing=(), patience=30.0, delays=None):
    """Run ranks in threads; each writes its name and reads the others'. Return what each of ranks 0..N-1 read."""

    def rank(number):
        threading.Event().wait((delays or {}).get(number, 0.0))
        store = fresh_store(client(agent), World(number, world), patience)
        store.set(f"name/{number}", f"{number}")
        return "".join(store.get(f"name/{other}").decode() for other in range(world))

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(rank, number) for number in range(world) if number not in missing]
        return [future.result() for future in futures]


def test_all_ranks_share_an_unused_prefix_and_ignore_leftovers_of_failed_attempts(agent):
    assert [attempt(agent, 3) for _ in range(2)] == [["012"] * 3] * 2
    # Attempts in which one rank never arrives: the others time out.
    for missing in (0, 1, 2):
        with pytest.raises(WorkerError, match=r"of 3 waited 0\.3 s for the other ranks"):
            attempt(agent, 3, missing=(missing,), patience=0.3)
    # Late ranks: the first to arrive read the leftovers of dead ranks and must not accept them.
    for late in (0, 1, 2):
        assert attempt(agent, 3, delays={late: 0.5}) == ["012"] * 3
    # A smaller and a larger world afterwards.
    assert attempt(agent, 2) == ["01"] * 2
    assert attempt(agent, 4) == ["0123"] * 4
    # What a dead rank wrote is not seen.
    client(agent).set("name/1", "dead")
    assert not fresh_store(client(agent), World(0, 1), 2.0).check(["name/1"])
