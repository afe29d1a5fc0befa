"""A sweep from start to finish in one process, which may be one of many started by torchrun.

    torchrun --nproc-per-node 2 -m fastvid.train RECIPE sync=relay [sync_options.order=ring ...]

RECIPE has a function ``sweep() -> list[Config]``, one entry per model; each ``key=value`` changes all of them. Every
process is a stage; rank 0 is also the hub. Stages share no process group, so the death of one does not affect the
others. torchrun, however, stops all processes of a job when one dies and restarts them, and the hub resumes from its
tokens. To add and remove stages during a sweep, start them as separate jobs:

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
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fastvid.errors import UsageError, WorkerError
from fastvid.format.dataset import Dataset
from fastvid.runtime.world import World
from fastvid.train.config.config import Config, to_json
from fastvid.train.ranks.rendezvous import fresh_store
from fastvid.train.records.metrics import METRICS_FILE, Recorder, clock
from fastvid.train.strategies.relay.clips import Clips, check_shared
from fastvid.train.strategies.relay.hub import Hub
from fastvid.train.strategies.relay.options import SweepOptions
from fastvid.train.strategies.relay.results import results, table
from fastvid.train.strategies.relay.scheduler import Scheduler
from fastvid.train.strategies.relay.stage import serve
from fastvid.train.strategies.relay.state_store import TokenStore
from fastvid.train.strategies.relay.visit import read_weights
from fastvid.train.strategies.shared.link import connect, listen

log = logging.getLogger(__name__)

SWEEP_FILE: Final = "sweep.json"
RESULTS_FILE: Final = "results.json"
_PLAN: Final = "relay/plan"
_PORT: Final = "relay/port"
_PAUSE_S: Final = 0.05  # between two polls for the plan; startup takes seconds anyway


def sweep(configs: Sequence[Config]) -> int:
    """Train all models, and return 0 when the sweep is finished.

    Raises:
        FastvidError: If data, models or options are wrong; raised before the first visit.
    """
    check_shared(configs)
    options = SweepOptions.of(configs[0])
    # The reference to the job's own store keeps it serving the other processes.
    store, world, _job = _rendezvous(options)
    if not torch.cuda.is_available():
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world is None or world.rank > 0:
        _work(configs, options, store, device)
    else:
        _HubProcess(configs, options, store, world.size).run(device)
    return 0


def _work(configs: Sequence[Config], options: SweepOptions, store: Store, device: torch.device) -> None:
    """Run a stage until the sweep is finished."""
    plan = _plan(store, options.timeout_s)
    if plan.get("over"):
        return
    pinned = [replace(config, data=replace(config.data, generation=plan["generation"])) for config in configs]
    serve(store, Clips(pinned, plan["partitions"], device), options.timeout_s)


class _HubProcess:
    """Rank 0, which is both the hub and a stage."""

    def __init__(self, configs: Sequence[Config], options: SweepOptions, store: Store, processes: int) -> None:
        self.configs, self.options, self.store = configs, options, store
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.plan = self._agree(processes)
        replay = None
        if options.replay is not None:
            recorded = json.loads(options.replay.read_text())["models"]
            replay = [model["visits"] for model in sorted(recorded, key=lambda model: model["model"])]
        self.scheduler = Scheduler(
            len(configs), self.plan["partitions"], configs[0].run.epochs,
            order=options.order, halving=options.halving, replay=replay,
        )  # fmt: skip
        self.token_store = TokenStore(len(configs), str(self.out / "tokens"))
        self.scheduler.restore(*self.token_store.history())
        self.recorder = Recorder(self.out / METRICS_FILE)
        self.hub = Hub(
            self.scheduler, store, self.token_store,
            timeout_s=options.timeout_s, adopt_s=options.adopt_s, on_visit=self._tell,
        )  # fmt: skip
        self.began, self._first = time.monotonic(), self._done

    def run(self, device: torch.device) -> None:
        """Run the sweep, and write its results."""
        if self.scheduler.finished and (self.out / RESULTS_FILE).exists():
            self.store.set(_PLAN, json.dumps({**self.plan, "over": True}))
            self.recorder.close()
            log.info("the sweep in %s is already finished", self.out)
            _print(json.loads((self.out / RESULTS_FILE).read_text()))
            return
        self.recorder.write("start", visits=self._done, partitions=self.plan["partitions"], models=len(self.configs))
        self.store.set(_PLAN, json.dumps(self.plan))
        with concurrent.futures.ThreadPoolExecutor(1, "relay-hub") as pool:
            hub = pool.submit(self.hub.run)
            try:
                _work(self.configs, self.options, self.store, device)
            except BaseException as error:
                # An error of this stage would occur on any other stage too. If the hub failed first, raise its error.
                self.hub.stop(error)
                hub.result()
                raise
            record = hub.result()
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

    def _agree(self, processes: int) -> dict[str, Any]:
        """Return the number of partitions and the generation, which a sweep keeps over restarts."""
        path = self.out / SWEEP_FILE
        before = json.loads(path.read_text()) if path.exists() else None
        generation = self.configs[0].data.generation
        if generation is None:
            data = self.configs[0].data
            generation = before["generation"] if before else Dataset(data.path).generation.number
        plan = {
            "partitions": self.options.partitions or (before["partitions"] if before else processes),
            "generation": generation,
        }
        models = json.loads(json.dumps([_kept(config) for config in self.configs]))
        if before is not None:
            for name, now in (*plan.items(), ("models", models)):
                if before[name] != now:
                    raise UsageError(
                        f"the sweep in run.out has different {name}", file=path, hint="use another run.out"
                    )
        path.write_text(json.dumps({**plan, "models": models}, indent=1) + "\n")
        return plan

    @property
    def _done(self) -> int:
        return sum(len(model.visits) for model in self.scheduler.models)

    def _tell(self, visit: dict[str, Any]) -> None:
        """Record and log a finished visit."""
        score = visit.get("eval")
        self.recorder.write("visit", **{name: value for name, value in visit.items() if name != "eval"})
        if score is not None:
            self.recorder.write("eval", model=visit["model"], epoch=visit["epoch"], **score)
        # This visit is not counted yet.
        done, total = self._done + 1, len(self.configs) * self.scheduler.epochs * self.scheduler.num_partitions
        left = (total - done) * (time.monotonic() - self.began) / (done - self._first)
        log.info(
            "%d/%d visits  model %d  epoch %d  partition %d  loss %.4f%s  left %s",
            done,
            total,
            visit["model"],
            visit["epoch"] + 1,
            visit["partition"],
            visit["loss"],
            "" if score is None else f"  evaluated: top1 {score['top1_percent']:.2f} %",
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


def _plan(store: Store, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not store.check([_PLAN]):
        if time.monotonic() > deadline:
            raise WorkerError(f"the hub published no plan for {timeout_s:g} s", hint="check the output of rank 0")
        time.sleep(_PAUSE_S)
    return dict(json.loads(store.get(_PLAN)))


def _rendezvous(options: SweepOptions) -> tuple[Store, World | None, Store | None]:
    """Connect hub and stages.

    There is no process group of all processes, so that a death breaks only the links of the dead process.

    Returns:
        The store shared by hub and stages; rank and world size in the hub's job, None in other jobs; and the job's own
        store, if there is one.
    """
    limit = timedelta(seconds=options.timeout_s)
    try:
        if options.hub is not None:
            return connect(*options.hub, options.timeout_s), None, None
        if "RANK" not in os.environ:
            return listen("127.0.0.1", options.port, options.timeout_s), World(), None
        store, rank, size = next(rendezvous("env://", timeout=limit))
        world = World(rank, size)
        store = fresh_store(store, world, options.timeout_s)
        if not options.port:
            return store, world, store
        # Stages of other jobs cannot access torchrun's store.
        host = os.environ["MASTER_ADDR"]
        if rank == 0:
            own = listen(host, options.port, options.timeout_s)
            store.set(_PORT, str(own.port))
            return own, world, store
        store.wait([_PORT], limit)
        return connect(host, options.port, options.timeout_s), world, store
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"the stages did not connect within {options.timeout_s:g} s: {error}",
            hint="check that all nodes are started and can reach the hub",
        ) from error
