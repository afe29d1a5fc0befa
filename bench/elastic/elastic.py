"""Elastic training under random accidents: nodes join, leave, are killed and are cut off from the network.

Each node is a network namespace of this machine with its own torchrun agent, all connected by a bridge; this needs
root. The rendezvous store runs outside the nodes, as etcd would. A sequence is a run of one to three nodes with random
accidents at random moments. Afterwards the weights must equal those of an undisturbed single-process run up to float64
rounding, and the lineage must be identical, sample for sample.

Accidents: ``join`` (another node starts), ``leave`` (SIGTERM to an agent), ``kill-worker`` (SIGKILL to a worker),
``kill-node`` (SIGKILL to an agent and its worker), ``cut`` (the node's link goes down and stays down).

Detection time: from the accident until all survivors' previous workers have exited. Recovery time: from the accident
until the new process group writes its first training row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.common.harness import machine_facts, options, write_json
from bench.common.hosts import Hosts
from bench.common.rounds import children
from bench.elastic import training_job
from fastvid.errors import JobError

ROOT: Final = Path(__file__).parents[2]
PORT: Final = 29400

_STORE: Final = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore({host!r}, {port}, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@contextlib.contextmanager
def network(nodes: int) -> Iterator[Hosts]:
    """Create one host per node, and a last one that runs the rendezvous store. Needs root."""
    with Hosts(nodes + 1) as hosts:
        code = _STORE.format(host=hosts.addresses[nodes], port=PORT)
        command = hosts.command(nodes, [sys.executable, "-c", code])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
            try:
                assert store.stdout is not None
                if store.stdout.readline().strip() != "ready":
                    raise JobError("the rendezvous store did not start")
                yield hosts
            finally:
                store.kill()


class Node:
    """One node: a torchrun agent in a namespace, with one worker."""

    def __init__(self, hosts: Hosts, number: int, recipe: Path, most: int, logs: Path) -> None:
        self.hosts, self.number, self.recipe, self.most = hosts, number, recipe, most
        self.log = logs / f"{recipe.stem}-node{number}.log"
        self.cut = False
        self._agent: subprocess.Popen[Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether its agent is running and reachable."""
        return self._agent is not None and self._agent.poll() is None and not self.cut

    def start(self) -> None:
        """Start the agent."""
        conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=120,is_host=0"
        command = self.hosts.command(self.number, [sys.executable, "-m", "torch.distributed.run"])
        command += ["--nnodes", f"1:{self.most}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-id", self.recipe.stem]
        command += ["--rdzv-endpoint", f"{self.hosts.addresses[-1]}:{PORT}", "--rdzv-conf", conf]
        command += ["--monitor-interval", "0.2"]
        command += ["--local-addr", self.hosts.addresses[self.number]]
        command += ["-m", "fastvid.train", str(self.recipe)]
        environment = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            **self.hosts.environment,
        }  # fmt: skip
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        return [] if self._agent is None else children(self._agent.pid)

    def leave(self) -> None:
        """Send SIGTERM to the agent, as a scheduler does, and wait for it."""
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=60)

    def kill_worker(self) -> None:
        """Send SIGKILL to the worker only."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL to agent and worker, like a power cut."""
        if self._agent is None or self._agent.poll() is not None:
            return
        pids = [self._agent.pid, *self.workers()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._agent.wait()
        time.sleep(0.05)

    def cut_off(self) -> None:
        """Disconnect the host for good; its processes keep running and must detect this themselves."""
        self.cut = True
        self.hosts.cut(self.number)


log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-elastic/1"
ACCIDENTS: Final = ("join", "leave", "kill-worker", "kill-node", "cut")
NODES: Final = 3


add_arguments = options(
    json="elastic.json",
    sequences=(20, "runs with accidents"),
    accidents=(4, "accidents per sequence"),
    at_once=(1, "concurrent sequences"),
    epochs=(40, "epochs per run, 4 steps each"),
    pause=(0.2, "seconds added to each step"),
    patience=(240.0, "limit for one recovery in seconds"),
    seed=(0, "seed of the accidents"),
)


def run(args: argparse.Namespace) -> int:
    """Run the sequences and write the result; exit code 1 if one ends with wrong weights or samples."""
    with tempfile.TemporaryDirectory(prefix="fastvid-elastic-") as folder:
        here = Path(folder)
        shards = training_job.make_dataset(here)
        truth = training_job.train_alone(shards, here / "undisturbed", epochs=args.epochs)
        sequences = []
        with ThreadPoolExecutor(args.at_once) as pool:
            running = [
                pool.submit(_sequence, here / f"s{number}", shards, truth, args, args.seed + number)
                for number in range(args.sequences)
            ]
            for number, sequence in enumerate(running):
                found = sequence.result()
                log.info("sequence %d: %s", number, json.dumps(found))
                sequences.append(found)
                record = summary(sequences) | {"at_once": args.at_once}
                write_json(args.json, {**record, "machine": machine_facts()})
    print(json.dumps({name: value for name, value in record.items() if name != "sequences"}, indent=1))
    return 0 if record["passed"] == len(sequences) else 1


def summary(sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the sequences: counts, and the median and worst detection and recovery time by accident."""
    times: dict[str, dict[str, Any]] = {}
    for kind in ACCIDENTS:
        events = [event for one in sequences for event in one["accidents"] if event["kind"] == kind]
        if events:
            times[kind] = {"count": len(events)}
            for what in ("detection_s", "recovery_s"):
                values = [event[what] for event in events if event[what] is not None]
                if values:
                    times[kind][what] = {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)}
    return {
        "schema": SCHEMA,
        "sequences": list(sequences),
        "passed": sum(one["passed"] for one in sequences),
        "weights_differ_by_at_most": max(one["difference"] for one in sequences),
        "timeout_s": training_job.TIMEOUT_S,
        "accidents": times,
    }


def _sequence(out: Path, shards: Path, truth: dict[str, Any], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    draws = random.Random(seed)
    recipe = training_job.write_recipe(shards, out, epochs=args.epochs, pause_s=args.pause)
    accidents: list[dict[str, Any]] = []
    with network(NODES) as hosts:
        nodes = [Node(hosts, number, recipe, NODES, out.parent) for number in range(NODES)]
        try:
            for node in nodes[: draws.randint(1, NODES)]:
                node.start()
            _until(lambda: training_job.count(out, "train") > 0, "start", nodes, args.patience)
            for _ in range(args.accidents):
                time.sleep(draws.uniform(0.5, 3.0))
                if training_job.is_finished(out):
                    break
                kind, node = _choose(nodes, draws)
                accidents.append(_accident(kind, node, nodes, out, args.patience))
            if not any(node.alive for node in nodes):
                nodes[0].start()
            rest = args.patience + 4 * args.epochs * (args.pause + 0.2)
            _until(lambda: training_job.is_finished(out), "end", nodes, rest)
        finally:
            for node in nodes:
                node.kill()
    found = training_job.outcome(out)
    difference = training_job.difference(truth["weights"], found["weights"])
    worlds = [row["world_size"] for row in training_job.rows(out) if row["kind"] == "start"]
    exact = found["lineage"] == truth["lineage"] and found["samples"] == truth["samples"]
    return {
        "seed": seed,
        "worlds": worlds,
        "accidents": accidents,
        "difference": difference,
        "lineage_exact": exact,
        "passed": bool(exact and difference < training_job.LIMIT),
    }


def _choose(nodes: Sequence[Node], draws: random.Random) -> tuple[str, Node]:
    """Draw an accident that leaves at least one node running."""
    alive, idle = [node for node in nodes if node.alive], [node for node in nodes if not node.alive and not node.cut]
    kinds = ["kill-worker"]
    if idle:
        kinds += ["join", "join"]
    if len(alive) > 1:
        kinds += ["leave", "kill-node", "cut"]
    kind = draws.choice(kinds)
    return kind, draws.choice(idle if kind == "join" else alive)


def _accident(kind: str, node: Node, nodes: Sequence[Node], out: Path, patience: float) -> dict[str, Any]:
    starts = training_job.count(out, "start")
    others = [other for other in nodes if other.alive and other is not node]
    before = [pid for other in others for pid in other.workers()]
    if kind == "kill-worker":
        before = [pid for other in (*others, node) for pid in other.workers()]
    log.info("%s of node %d; %d nodes", kind, node.number, len(others) + node.alive)
    began = time.monotonic()
    {
        "join": node.start, "leave": node.leave, "kill-worker": node.kill_worker, "kill-node": node.kill,
        "cut": node.cut_off,
    }[kind]()  # fmt: skip
    detected: float | None = None
    deadline = began + patience
    while time.monotonic() < deadline:
        if detected is None and not any(Path(f"/proc/{pid}").exists() for pid in before):
            detected = time.monotonic() - began
        if training_job.is_finished(out):
            break
        if training_job.count(out, "start") > starts and training_job.rows_after_start(out):
            return {
                "kind": kind,
                "detection_s": detected,
                "recovery_s": time.monotonic() - began,
            }
        time.sleep(0.1)
    else:
        raise JobError(f"no recovery from {kind} within {patience:g} s", file=out)
    return {"kind": kind, "detection_s": detected, "recovery_s": None}


def _until(reached: Callable[[], bool], what: str, nodes: Sequence[Node], patience: float) -> None:
    deadline = time.monotonic() + patience
    while not reached():
        if time.monotonic() > deadline or not any(node.alive for node in nodes):
            raise JobError(f"training did not {what}", hint=f"see {', '.join(str(node.log) for node in nodes)}")
        time.sleep(0.2)
