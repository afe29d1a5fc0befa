"""A sweep from beginning to end in one process, which may be one of many that torchrun started.

    torchrun --nproc-per-node 2 -m fastvid.train RECIPE sync=relay [sync_options.order=ring ...]

RECIPE has a function ``sweep() -> list[Config]``, one entry a model; each ``key=value`` changes all of them. Every
process is a stage; the first one is the hub as well. Stages share no process group, so the death of one is no matter to
the others; but torchrun ends all processes of its job when one dies, and starts them again, and the hub goes on from
its tokens. Stages that are to come and go are jobs of their own:

    torchrun ... -m fastvid.train RECIPE sync=relay sync_options.port=29600
    torchrun ... -m fastvid.train RECIPE sync=relay sync_options.hub=HOST:29600      any number of stages

A sweep's folder, which is the models' ``run.out``:
    sweep.json      number of partitions, generation, and every model's configuration
    metrics.jsonl   one row a visit and an evaluation, as they end
    tokens/         the newest token of every model, see `fastvid.train.strategies.relay.state_store`
    weights/        the weights of every model that was trained to the end, for ``model.weights``
    results.json    see `fastvid.train.strategies.relay.results`

A process may be ended at any time: the visits under way are made again.
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
from fastvid.train.strategies.relay.state_store import Shelf
from fastvid.train.strategies.relay.visit import read_weights
from fastvid.train.strategies.shared.link import connect, listen

log = logging.getLogger(__name__)

SWEEP_FILE: Final = "sweep.json"
RESULTS_FILE: Final = "results.json"
_PLAN: Final = "relay/plan"
_PORT: Final = "relay/port"
_PAUSE_S: Final = 0.05  # between two looks for the plan; a start takes seconds anyway


def sweep(configs: Sequence[Config]) -> int:
    """Trains all models. Returns 0 when the sweep is over.

    Raises:
        FastvidError: What is wrong with data, models or options is raised before the first visit.
    """
    check_shared(configs)
    options = SweepOptions.of(configs[0])
    # The job's own store serves others as long as it is held.
    store, world, _job = _meet(options)
    if not torch.cuda.is_available():
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world is None or world.rank > 0:
        _work(configs, options, store, device)
    else:
        _Lead(configs, options, store, world.size).run(device)
    return 0


def _work(configs: Sequence[Config], options: SweepOptions, store: Store, device: torch.device) -> None:
    """A stage, until the sweep is over."""
    plan = _plan(store, options.timeout_s)
    if plan.get("over"):
        return
    pinned = [replace(config, data=replace(config.data, generation=plan["generation"])) for config in configs]
    serve(store, Clips(pinned, plan["partitions"], device), options.timeout_s)


class _Lead:
    """The first process: hub, and stage."""

    def __init__(self, configs: Sequence[Config], options: SweepOptions, store: Store, processes: int) -> None:
        self.configs, self.options, self.store = configs, options, store
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.plan = self._agree(processes)
        replay = None
        if options.replay is not None:
            found = json.loads(options.replay.read_text())["models"]
            replay = [model["visits"] for model in sorted(found, key=lambda model: model["model"])]
        self.scheduler = Scheduler(
            len(configs), self.plan["partitions"], configs[0].run.epochs,
            order=options.order, halving=options.halving, replay=replay,
        )  # fmt: skip
        self.shelf = Shelf(len(configs), str(self.out / "tokens"))
        self.scheduler.restore(*self.shelf.history())
        self.recorder = Recorder(self.out / METRICS_FILE)
        self.hub = Hub(
            self.scheduler, store, self.shelf,
            timeout_s=options.timeout_s, adopt_s=options.adopt_s, told=self._tell,
        )  # fmt: skip
        self.began, self._first = time.monotonic(), self._done

    def run(self, device: torch.device) -> None:
        """Until the sweep is over."""
        if self.scheduler.finished and (self.out / RESULTS_FILE).exists():
            self.store.set(_PLAN, json.dumps({**self.plan, "over": True}))
            self.recorder.close()
            log.info("the sweep in %s is over", self.out)
            _print(json.loads((self.out / RESULTS_FILE).read_text()))
            return
        self.recorder.write("start", visits=self._done, partitions=self.plan["partitions"], models=len(self.configs))
        self.store.set(_PLAN, json.dumps(self.plan))
        with concurrent.futures.ThreadPoolExecutor(1, "relay-hub") as pool:
            hub = pool.submit(self.hub.run)
            try:
                _work(self.configs, self.options, self.store, device)
            except BaseException as error:
                # What a stage cannot do on this data, no other could. And what ended the hub is why its stage ended.
                self.hub.stop(error)
                hub.result()
                raise
            record = hub.result()
        self.recorder.close()
        found = results(self.configs, self.scheduler, record, time.monotonic() - self.began)
        (self.out / "weights").mkdir(exist_ok=True)
        for model in self.scheduler.models:
            token = self.shelf.get(model.model)
            if model.status == "over" and token is not None:
                torch.save(read_weights(token), self.out / "weights" / f"model-{model.model:04d}.pt")
        (self.out / RESULTS_FILE).write_text(json.dumps(found, indent=1) + "\n")
        log.info("sweep is over\n%s", table(found))
        _print(found)

    def _agree(self, processes: int) -> dict[str, Any]:
        """What a sweep keeps from its first start to its end."""
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
                    raise UsageError(f"the sweep in run.out has other {name}", file=path, hint="use another run.out")
        path.write_text(json.dumps({**plan, "models": models}, indent=1) + "\n")
        return plan

    @property
    def _done(self) -> int:
        return sum(len(model.visits) for model in self.scheduler.models)

    def _tell(self, visit: dict[str, Any]) -> None:
        """Shows a visit that was done."""
        score = visit.get("eval")
        self.recorder.write("visit", **{name: value for name, value in visit.items() if name != "eval"})
        if score is not None:
            self.recorder.write("eval", model=visit["model"], epoch=visit["epoch"], **score)
        # This one is not booked yet.
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
    """The sweep's result, for whoever started it."""
    print(json.dumps({name: value for name, value in found.items() if name != "timeline"}), flush=True)  # noqa: T201


def _kept(config: Config) -> Any:
    """The settings that decide what a model becomes, given the order of its visits."""
    tree = to_json(replace(config, sync_options={}))
    for name in ("out", "timeout_s", "resume", "log_every_steps"):
        tree["run"].pop(name)
    return tree


def _plan(store: Store, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while not store.check([_PLAN]):
        if time.monotonic() > deadline:
            raise WorkerError(f"the hub gave no plan for {timeout_s:g} s", hint="look at the output of rank 0")
        time.sleep(_PAUSE_S)
    return dict(json.loads(store.get(_PLAN)))


def _meet(options: SweepOptions) -> tuple[Store, World | None, Store | None]:
    """The store where hub and stages meet; this process' place in the hub's job, None in another; and the job's store.

    There is no process group of all, so that a death ends its own line alone.
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
        # Jobs of other stages cannot know torchrun's store.
        host = os.environ["MASTER_ADDR"]
        if rank == 0:
            own = listen(host, options.port, options.timeout_s)
            store.set(_PORT, str(own.port))
            return own, world, store
        store.wait([_PORT], limit)
        return connect(host, options.port, options.timeout_s), world, store
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"the stages did not meet within {options.timeout_s:g} s: {error}",
            hint="are all nodes started, and can each reach the hub?",
        ) from error
