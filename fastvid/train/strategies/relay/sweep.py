"""The strategy ``sync=relay``: a sweep over several models; one process's part from start to finish.

    torchrun --nproc-per-node 2 -m fastvid.train RECIPE sync=relay [sync_options.order=ring ...]

RECIPE has a function ``sweep() -> list[Config]``, one entry per model; each ``key=value`` changes all of them. Every
process is a stage; rank 0 is also the hub. Stages share no process group, so the death of one does not affect the
others. torchrun, however, stops all processes of a job when one dies and restarts them, and the hub resumes from its
tokens, the stored states of the models. To add and remove stages during a sweep, start them as separate jobs:

    export FASTVID_TOKEN=$(openssl rand -hex 32)      the same for every job
    torchrun ... -m fastvid.train RECIPE sync=relay sync_options.port=29600
    torchrun ... -m fastvid.train RECIPE sync=relay sync_options.hub=HOST:29600      any number of stages

A sweep's folder, which is the models' ``run.out``:
    sweep.json      number of partitions, generation, and every model's configuration
    metrics.jsonl   one row per visit and per evaluation, in the order of their ends
    tokens/         the newest token of every model, see `TokenStore`
    weights/        the weights that evaluations use, of every model trained to the end, for ``model.weights``
    results.json    see `results`

A process may be killed at any time: the visits in progress are repeated.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch.distributed.distributed_c10d import Store

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_choice, duration, json_text
from fastvid.storage import LocalStorage
from fastvid.train.config.config import Config, differing, flatten, to_json
from fastvid.train.loop.strategy import Strategy
from fastvid.train.ranks import Member, as_worker_error, device_of, meet
from fastvid.train.records.checkpoint import decode, evaluated_weights
from fastvid.train.records.records import METRICS_FILE, Recorder, shown_number
from fastvid.train.strategies.link import Address, host_of_job, server_elsewhere
from fastvid.train.strategies.relay.hub import Hub, SweepRecord, TokenStore
from fastvid.train.strategies.relay.scheduler import ModelProgress, Order, Scheduler
from fastvid.train.strategies.relay.stage import Clips, serve

RESULTS_FILE: Final = "results.json"


class Relay(Strategy):
    """The strategy ``sync=relay``: trains all models of a recipe in one sweep, which replaces the training loop.

    Args:
        member: This process.
        order: "ring" or "hopper".
        partitions: S, number of partitions; None uses the number of processes, or that of the resumed sweep.
        adopt_s: Seconds that the partitions of a dead stage wait for a new stage before an existing one takes them.
        hub: ``host:port`` of a hub in another job; this job then has no hub, only stages.
        host: Name or address of rank 0's machine that the hub listens on, as stages reach it; None is torchrun's
            ``MASTER_ADDR``, and without torchrun 127.0.0.1.
        port: Port of this job's hub, for stages of other jobs; 0 for any free one.

    Raises:
        UsageError: If an option is out of range.
    """

    record = RESULTS_FILE
    shares_batches = False
    steps_alike = True  # each model is on one rank at a time, so no two copies can differ

    def __init__(
        self,
        member: Member,
        *,
        order: Order = "hopper",
        partitions: int | None = None,
        adopt_s: float = 30.0,
        hub: str | None = None,
        host: str | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(member)
        check_choice("sync option order", order, get_args(Order))
        if partitions is not None and (not isinstance(partitions, int) or partitions < 1):
            raise UsageError(f"sync option partitions is {partitions!r}, expected at least 1")
        self.order, self.partitions, self.adopt_s = order, partitions, adopt_s
        self.hub = server_elsewhere("hub", hub, port)
        self.host, self.port = host or host_of_job(), port

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.data.mixture:
            raise UsageError(
                "sync 'relay' divides one dataset into partitions, but data.mixture names further datasets",
                hint="merge them with `fastvid merge`, or use another sync",
            )
        run = config.run
        others = {"loggers": {*run.loggers} - {"jsonl"}, "callbacks": run.callbacks, "checkpoints": run.checkpoints}
        for name, value in others.items():
            if value:
                raise UsageError(
                    f"sync 'relay' does not use run.{name}", hint="leave it out: a sweep writes only to run.out"
                )
        cls(Member(World(), torch.device("cpu")), **config.sync_options)

    @classmethod
    def rehearse(cls, configs: Sequence[Config], world_size: int) -> None:
        relay = cls(Member(World(), torch.device("cpu")), **configs[0].sync_options)
        # A stage of another job takes its plan from the hub.
        if relay.hub is None:
            prepare(configs, relay, world_size)

    @classmethod
    def start(cls, configs: Sequence[Config], train: Callable[[Config], int]) -> int:  # noqa: ARG003
        """Train all models, and return 0 when the sweep is finished."""
        device, timeout_s = device_of(os.environ), configs[0].run.timeout_s
        if device.type == "cuda":
            torch.cuda.set_device(device)
        relay = cls(Member(World(), device), **configs[0].sync_options)
        store: Store | None = None
        hub = relay.hub
        if hub is None:
            # No process group is created, so that a death breaks only the links of the dead process.
            world, store = meet(timeout_s) if "RANK" in os.environ else (World(), None)
            if world.rank == 0:
                _HubProcess(configs, relay, store, world.size).run()
                return 0
            assert store is not None
            with as_worker_error("the hub did not start"):
                store.wait([_HUB], timedelta(seconds=timeout_s))
                found = store.get(_HUB)
            hub = Address.decode(found) if found else None
        if hub is not None:
            serve(hub, lambda plan: _clips(configs, plan, device), timeout_s)
        return 0


def results(configs: Sequence[Config], scheduler: Scheduler, record: SweepRecord, seconds: float) -> dict[str, Any]:
    """Return the results of a sweep as JSON values.

    ``models``: best first, each with the settings in which it differs, scores by epoch, and its visits. ``seconds``:
    duration of the sweep. ``bound_seconds``: lower bound of that for any order of the same visits: the time of the
    model that takes longest, or all visits spread evenly over the partitions. ``dataset_bytes``: bytes of the
    partitions that were loaded. ``token_bytes``, ``lost`` and ``timeline``: see `SweepRecord`.
    """
    settings = [flatten(to_json(config)) for config in configs]
    varied = differing(settings)
    spent = [sum(visit["seconds"] for visit in record.visits if visit["model"] == m) for m in range(len(configs))]
    ranked = sorted(scheduler.models, key=rank)
    return {
        "order": scheduler.order,
        "partitions": scheduler.num_partitions,
        "models": [
            {
                **{name: value for name, value in dataclasses.asdict(model).items() if name != "arrived"},
                "seconds": spent[model.model],
                "score": model.scores[-1] if model.scores else None,
                "settings": {name: settings[model.model].get(name) for name in varied},
            }
            for model in ranked
        ],
        "seconds": seconds,
        "bound_seconds": max(max(spent), sum(spent) / scheduler.num_partitions),
        "dataset_bytes": {"loaded": record.dataset_bytes},
        "token_bytes": record.token_bytes,
        "lost": record.lost,
        "timeline": record.visits,
    }


def rank(model: ModelProgress) -> tuple[bool, int, float, int]:
    """Return the sort key of a model: failed models last, then by most epochs, then by highest last score."""
    score = model.scores[-1] if model.scores else -math.inf
    return model.status == "failed", -len(model.scores), math.inf if math.isnan(score) else -score, model.model


def table(summary: Mapping[str, Any]) -> str:
    """Return the models of a summary from `results` as a table in plain text, best first."""
    models = summary["models"]
    names = list(models[0]["settings"]) if models else []
    head = ["model", *names, "score", "epochs", "status", "time"]
    rows = [
        [
            str(model["model"]),
            *(str(model["settings"][name]) for name in names),
            "-" if model["score"] is None else f"{model['score']:.2f}",
            str(len(model["scores"])),
            model["status"],
            duration(model["seconds"]),
        ]
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *rows])


log = logging.getLogger(__name__)

SWEEP_FILE: Final = "sweep.json"
_HUB: Final = "relay/hub"


def prepare(configs: Sequence[Config], relay: Relay, processes: int) -> tuple[dict[str, Any], Clips, Scheduler]:
    """Check a sweep without writing anything; return the contents of sweep.json, the worker and the scheduler.

    The sweep and its dry run both begin here.
    """
    path = Path(configs[0].run.out) / SWEEP_FILE
    before = json.loads(path.read_text()) if path.exists() else None
    if before is not None and not configs[0].run.resume:
        hint = "choose another run.out, or set run.resume=true"
        raise UsageError("run.out already contains a sweep", file=path, hint=hint)
    generation = configs[0].data.generation
    if not isinstance(generation, int):
        generation = (
            before["generation"] if before else Dataset(configs[0].data.path, generation=generation).generation.number
        )
    sweep = {
        "partitions": relay.partitions or (before["partitions"] if before else processes),
        "generation": generation,
        "models": json.loads(json.dumps([_kept(config) for config in configs])),
    }
    for name, now in sweep.items():
        if before is not None and before[name] != now:
            raise UsageError(f"the sweep in run.out has different {name}", file=path, hint="use another run.out")
    scheduler = Scheduler(len(configs), sweep["partitions"], configs[0].run.epochs, order=relay.order)
    return sweep, _clips(configs, sweep, relay.member.device), scheduler


def _clips(configs: Sequence[Config], plan: Mapping[str, Any], device: torch.device) -> Clips:
    pinned = [replace(config, data=replace(config.data, generation=plan["generation"])) for config in configs]
    return Clips(pinned, plan["partitions"], device)


class _HubProcess:
    """Rank 0, which is both the hub and a stage."""

    def __init__(self, configs: Sequence[Config], relay: Relay, store: Store | None, processes: int) -> None:
        self.configs, self.relay, self.store = configs, relay, store
        self.out, self.timeout_s = Path(configs[0].run.out), configs[0].run.timeout_s
        # Checked before anything is written, so that a rejected sweep leaves no files.
        sweep, self.clips, self.scheduler = prepare(configs, relay, processes)
        self.plan = {name: sweep[name] for name in ("partitions", "generation")}
        # Atomically, as all files of the folder: a killed sweep could not be resumed from a part of this one.
        self.files = LocalStorage(self.out)
        self.files.write(SWEEP_FILE, f"{json.dumps(sweep, indent=1)}\n".encode())
        self.token_store = TokenStore(len(configs), str(self.out / "tokens"))
        self.scheduler.restore(*self.token_store.history())
        self.recorder = Recorder(self.out / METRICS_FILE)
        self.began, self._first = time.monotonic(), self._done
        self._told = 0

    def run(self) -> None:
        """Run the sweep, and write its results."""
        if self.scheduler.finished and (self.out / RESULTS_FILE).exists():
            if self.store is not None:
                self.store.set(_HUB, "")  # tells the other ranks that there is no hub
            self.recorder.close()
            log.info("the sweep in %s is already finished", self.out)
            return
        hub = Hub(
            self.scheduler, self.token_store, timeout_s=self.timeout_s, adopt_s=self.relay.adopt_s,
            on_visit=self._tell, plan=self.plan, host=self.relay.host, port=self.relay.port,
        )  # fmt: skip
        self.recorder.write("start", visits=self._done, partitions=self.plan["partitions"], models=len(self.configs))
        if self.store is not None:
            self.store.set(_HUB, hub.address.encode().decode())
        with concurrent.futures.ThreadPoolExecutor(1, "relay-hub") as pool:
            ran = pool.submit(hub.run)
            try:
                serve(hub.address, lambda _: self.clips, self.timeout_s)
            except BaseException as error:
                # The error would occur on any other stage too, so stop. If the hub failed first, raise its error.
                hub.stop(error)
                ran.result()
                raise
            record = ran.result()
        self.recorder.close()
        summary = results(self.configs, self.scheduler, record, time.monotonic() - self.began)
        for model in self.scheduler.models:
            token = self.token_store.get(model.model)
            if model.status == "over" and token is not None:
                with self.files.create(f"weights/model-{model.model:04d}.pt") as file:
                    torch.save(evaluated_weights(decode(token, "token")), file)
        self.files.write(RESULTS_FILE, f"{json_text(summary, indent=1)}\n".encode())
        log.info("sweep finished\n%s", table(summary))

    @property
    def _done(self) -> int:
        return sum(len(model.visits) for model in self.scheduler.models)

    def _tell(self, visit: dict[str, Any]) -> None:
        """Record and log a finished visit."""
        score = visit.get("eval")
        self.recorder.write("visit", **{name: value for name, value in visit.items() if name != "eval"})
        if score is not None:
            self.recorder.write("eval", model=visit["model"], epoch=visit["epoch"], **score)
        self._told += 1  # counted here, because the scheduler counts a visit only after its token is stored
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
            duration(left),
        )


def _kept(config: Config) -> Any:
    """Return the settings that, together with the order of visits, determine a trained model."""
    tree = to_json(replace(config, sync_options={}))
    for name in ("out", "timeout_s", "resume", "log_every_steps"):
        tree["run"].pop(name)
    return tree
