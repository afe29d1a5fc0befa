"""A sweep from start to finish in one process, which may be one of many started by torchrun.

    torchrun --nproc-per-node 2 -m fastvid.train RECIPE sync=relay [sync_options.order=ring ...]

RECIPE has a function ``sweep() -> list[Config]``, one entry per model; each ``key=value`` changes all of them. Every
process is a stage; rank 0 is also the hub. Stages share no process group, so the death of one does not affect the
others. torchrun, however, stops all processes of a job when one dies and restarts them, and the hub resumes from its
tokens. To add and remove stages during a sweep, start them as separate jobs:

    export FASTVID_TOKEN=$(openssl rand -hex 32)      the same for every job
    torchrun ... -m fastvid.train RECIPE sync=relay sync_options.port=29600
    torchrun ... -m fastvid.train RECIPE sync=relay sync_options.hub=HOST:29600      any number of stages

A sweep's folder, which is the models' ``run.out``:
    sweep.json      number of partitions, generation, and every model's configuration
    metrics.jsonl   one row per visit and per evaluation, in the order of their ends
    tokens/         the newest token of every model, see `fastvid.train.strategies.relay.state_store`
    weights/        the weights of every model trained to the end, for ``model.weights``
    results.json    see `fastvid.train.strategies.relay.results`

A process may be killed at any time: the visits in progress are repeated.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fastvid.errors import UsageError, WorkerError
from fastvid.format.dataset import Dataset
from fastvid.runtime.processes import World
from fastvid.train.config.config import Config, to_json
from fastvid.train.ranks import device_of, fresh_store
from fastvid.train.records.records import METRICS_FILE, Recorder, clock, shown_number
from fastvid.train.strategies.relay.clips import Clips
from fastvid.train.strategies.relay.hub import Hub
from fastvid.train.strategies.relay.options import SweepOptions
from fastvid.train.strategies.relay.results import results, table
from fastvid.train.strategies.relay.scheduler import Scheduler
from fastvid.train.strategies.relay.stage import serve
from fastvid.train.strategies.relay.state_store import TokenStore
from fastvid.train.strategies.relay.visit import read_weights
from fastvid.train.strategies.shared.link import Address, as_worker_error, host_of_job

log = logging.getLogger(__name__)

SWEEP_FILE: Final = "sweep.json"
RESULTS_FILE: Final = "results.json"
_HUB: Final = "relay/hub"


@dataclass(frozen=True)
class Prepared:
    """What is known about a sweep before its first visit."""

    plan: dict[str, Any]
    models: list[Any]
    clips: Clips
    scheduler: Scheduler


def prepare(configs: Sequence[Config], options: SweepOptions, processes: int, device: torch.device) -> Prepared:
    """Check a sweep without writing anything; the sweep and its dry run both begin here."""
    path = Path(options.out) / SWEEP_FILE
    before = json.loads(path.read_text()) if path.exists() else None
    generation = configs[0].data.generation
    if not isinstance(generation, int):
        generation = (
            before["generation"] if before else Dataset(configs[0].data.path, generation=generation).generation.number
        )
    plan = {
        "partitions": options.partitions or (before["partitions"] if before else processes),
        "generation": generation,
    }
    models = json.loads(json.dumps([_kept(config) for config in configs]))
    if before is not None:
        for name, now in (*plan.items(), ("models", models)):
            if before[name] != now:
                raise UsageError(f"the sweep in run.out has different {name}", file=path, hint="use another run.out")
    scheduler = Scheduler(len(configs), plan["partitions"], configs[0].run.epochs, order=options.order)
    return Prepared(plan, models, _clips(configs, plan, device), scheduler)


def sweep(configs: Sequence[Config]) -> int:
    """Train all models, and return 0 when the sweep is finished."""
    options = SweepOptions.of(configs[0])
    device = device_of(os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.hub is not None:
        _work(configs, options.hub, options, device)
        return 0
    world, store = _rendezvous(options)
    if world.rank == 0:
        _HubProcess(configs, options, store, world.size, device).run()
        return 0
    assert store is not None
    with as_worker_error("the hub did not start"):
        store.wait([_HUB], timedelta(seconds=options.timeout_s))
        hub = store.get(_HUB)
    if hub:
        _work(configs, Address.decode(hub), options, device)
    return 0


def _work(configs: Sequence[Config], hub: Address, options: SweepOptions, device: torch.device) -> None:
    """Run a stage until the sweep is finished."""
    serve(hub, lambda plan: _clips(configs, plan, device), options.timeout_s)


def _clips(configs: Sequence[Config], plan: Mapping[str, Any], device: torch.device) -> Clips:
    pinned = [replace(config, data=replace(config.data, generation=plan["generation"])) for config in configs]
    return Clips(pinned, plan["partitions"], device)


class _HubProcess:
    """Rank 0, which is both the hub and a stage."""

    def __init__(
        self,
        configs: Sequence[Config],
        options: SweepOptions,
        store: Store | None,
        processes: int,
        device: torch.device,
    ) -> None:
        self.configs, self.options, self.store = configs, options, store
        self.out = Path(options.out)
        # Before anything is written, so that a sweep that is refused leaves nothing.
        prepared = prepare(configs, options, processes, device)
        self.plan, self.clips, self.scheduler = prepared.plan, prepared.clips, prepared.scheduler
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / SWEEP_FILE).write_text(json.dumps({**self.plan, "models": prepared.models}, indent=1) + "\n")
        self.token_store = TokenStore(len(configs), str(self.out / "tokens"))
        self.scheduler.restore(*self.token_store.history())
        self.recorder = Recorder(self.out / METRICS_FILE)
        self.began, self._first = time.monotonic(), self._done
        self._told = 0

    def run(self) -> None:
        """Run the sweep, and write its results."""
        if self.scheduler.finished and (self.out / RESULTS_FILE).exists():
            if self.store is not None:
                self.store.set(_HUB, "")  # there is none
            self.recorder.close()
            log.info("the sweep in %s is already finished", self.out)
            _print(json.loads((self.out / RESULTS_FILE).read_text()))
            return
        hub = Hub(
            self.scheduler, self.token_store,
            timeout_s=self.options.timeout_s, adopt_s=self.options.adopt_s, on_visit=self._tell, plan=self.plan,
            host=self.options.host or host_of_job(), port=self.options.port,
        )  # fmt: skip
        self.recorder.write("start", visits=self._done, partitions=self.plan["partitions"], models=len(self.configs))
        if self.store is not None:
            self.store.set(_HUB, hub.address.encode().decode())
        with concurrent.futures.ThreadPoolExecutor(1, "relay-hub") as pool:
            ran = pool.submit(hub.run)
            try:
                serve(hub.address, lambda _: self.clips, self.options.timeout_s)
            except BaseException as error:
                # An error of this stage would occur on any other stage too. If the hub failed first, raise its error.
                hub.stop(error)
                ran.result()
                raise
            record = ran.result()
        self.recorder.close()
        summary = results(self.configs, self.scheduler, record, time.monotonic() - self.began)
        (self.out / "weights").mkdir(exist_ok=True)
        for model in self.scheduler.models:
            token = self.token_store.get(model.model)
            if model.status == "over" and token is not None:
                torch.save(read_weights(token), self.out / "weights" / f"model-{model.model:04d}.pt")
        (self.out / RESULTS_FILE).write_text(json.dumps(summary, indent=1) + "\n")
        log.info("sweep finished\n%s", table(summary))
        _print(summary)

    @property
    def _done(self) -> int:
        return sum(len(model.visits) for model in self.scheduler.models)

    def _tell(self, visit: dict[str, Any]) -> None:
        """Record and log a finished visit."""
        score = visit.get("eval")
        self.recorder.write("visit", **{name: value for name, value in visit.items() if name != "eval"})
        if score is not None:
            self.recorder.write("eval", model=visit["model"], epoch=visit["epoch"], **score)
        self._told += 1  # the scheduler counts a visit only when its token is stored
        metric = self.configs[visit["model"]].task.metric
        done = self._first + self._told
        total = len(self.configs) * self.scheduler.epochs * self.scheduler.num_partitions
        left = (total - done) * (time.monotonic() - self.began) / self._told
        log.info(
            "%d/%d visits  model %d  epoch %d  partition %d  loss %.4f%s  left %s",
            done,
            total,
            visit["model"],
            visit["epoch"] + 1,
            visit["partition"],
            visit["loss"],
            "" if score is None else f"  evaluated: {shown_number(metric, score[metric])}",
            clock(left),
        )


def _print(found: Mapping[str, Any]) -> None:
    """Print the result of the sweep to stdout as JSON."""
    print(json.dumps({name: value for name, value in found.items() if name != "timeline"}), flush=True)  # noqa: T201


def _kept(config: Config) -> Any:
    """Return the settings that, together with the order of visits, determine a trained model."""
    tree = to_json(replace(config, sync_options={}))
    for name in ("out", "timeout_s", "resume", "log_every_steps"):
        tree["run"].pop(name)
    return tree


def _rendezvous(options: SweepOptions) -> tuple[World, Store | None]:
    """Return the rank and world size in this job, and the job's store, which no other attempt of the job has used.

    There is no process group of all processes, so that a death breaks only the links of the dead process.
    """
    if "RANK" not in os.environ:
        return World(), None
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=options.timeout_s)))
        return World(rank, size), fresh_store(store, World(rank, size), options.timeout_s)
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"the stages did not connect within {options.timeout_s:g} s: {error}",
            hint="check that all nodes are started and can reach the hub",
        ) from error
