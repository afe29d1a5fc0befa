"""A stage: a process that keeps partitions of the dataset, and trains the models that visit it.

Each partition consists of some shards. The files of a remote partition are copied to a local disk once: to the folder
of FASTVID_CACHE, or a temporary one. A visit loads a model from its token (the bytes of its training state), trains it
on a partition, and returns a new token.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.order.mixture import Mixture
from fastvid.runtime import faults
from fastvid.runtime.processes import World
from fastvid.storage import RemoteOptions, Storage, open_storage
from fastvid.train.config.config import Config, differing, flatten, to_json
from fastvid.train.loop.loop import Stepper
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.evaluate import Score, evaluate
from fastvid.train.parts.replica import Lineage, Loader, Replica, hash64
from fastvid.train.ranks import Member
from fastvid.train.records.checkpoint import decode, encode
from fastvid.train.run import assemble
from fastvid.train.run.assemble import open_datasets
from fastvid.train.strategies.link import Address, open_link
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.tasks.task import LOSS


def serve(hub: Address, begin: Callable[[Mapping[str, Any]], Any], timeout_s: float) -> None:
    """Train the units assigned by the hub until the sweep is finished.

    The hub sends "plan" first, then "own" (partitions to keep, answered by "ready"), "unit" (answered by "done" with
    the new token, or by "failed") and "end".

    `begin`: called with the hub's plan; returns a worker such as `Clips`, which has two methods. ``assign(partitions)``
    keeps exactly these partitions from now on, and returns JSON values for the results. ``visit(unit, token)`` trains a
    unit, and returns the new token and JSON values, including ``score`` if the unit ends an epoch; if the model cannot
    be trained further, an empty token and ``reason``. An exception stops the stage.

    `timeout_s`: seconds of silence after which the hub is considered dead.
    """
    link = open_link(hub, timeout_s)
    plan = link.receive().values
    with link.beating():
        worker = begin(plan)
    while (asked := link.receive()).kind != "end":
        began = time.perf_counter()
        with link.beating():
            if asked.kind == "own":
                kind, report, token = "ready", worker.assign(tuple(asked["partitions"])), b""
            else:
                faults.reach("visit")
                known = None if asked.payload is None else asked.payload.numpy().tobytes()
                token, report = worker.visit(Unit(**asked.values), known)
                report["seconds"] = time.perf_counter() - began
                kind = "failed" if "reason" in report else "done"
        faults.reach("visited")
        link.send(kind, report, token)
    link.close()


def deal_shards(samples: Sequence[int], num_partitions: int) -> list[tuple[int, ...]]:
    """Return the shards of each partition, with numbers of samples as equal as possible: the largest sets the pace.

    Shards are assigned largest first, each to the partition with the fewest samples so far. The largest partition is
    then at most 4/3 of the optimum (Graham 1969).

    `samples`: number of training samples in each shard; shards without any are not assigned.
    """
    useful = [shard for shard, count in enumerate(samples) if count]
    if len(useful) < num_partitions:
        raise UsageError(
            f"only {len(useful)} shards contain samples of the split, fewer than {num_partitions} partitions",
            hint="use fewer stages, or shard the videos again with a smaller --samples-per-shard",
        )
    dealt: list[list[int]] = [[] for _ in range(num_partitions)]
    sizes = [0] * num_partitions
    for shard in sorted(useful, key=lambda shard: (-samples[shard], shard)):
        smallest = sizes.index(min(sizes))
        dealt[smallest].append(shard)
        sizes[smallest] += samples[shard]
    return [tuple(sorted(shards)) for shards in dealt]


def samples_by_shard(dataset: Dataset) -> list[int]:
    """Return the number of selected samples in each shard of the generation."""
    shards, _ = dataset.locate(np.arange(len(dataset)))
    return [int(count) for count in np.bincount(shards, minlength=len(dataset.generation.shards))]


class Partition(Dataset):
    """A dataset with only the samples of some shards, whose files are read through `storage`."""

    def __init__(self, whole: Dataset, shards: Sequence[int], storage: Storage) -> None:
        super().__init__(whole.storage.url, split=whole.split, where=whole.where, generation=whole.generation.number)
        # Set only now, so that `storage` keeps no copies of the annotations, which were read above.
        self.storage = storage
        self.shards = tuple(shards)
        owner, _ = self.locate(np.arange(len(self)))
        self.rows = self.rows[np.isin(owner, self.shards)]

    def load(self) -> int:
        """Copy all files that training reads to this machine, unless they are on its disks; return their total size."""
        shards = [self.generation.shards[shard] for shard in self.shards]
        names = [name for shard in shards for name in (f"{shard.name}.pkt", shard.data)]
        for name in names:
            self.storage.keep(name)
        return sum(self.storage.size(name) for name in names)


def local_copies(url: str) -> Storage:
    """Open a dataset's storage; if it is remote, `keep` copies files to FASTVID_CACHE or a temporary folder."""
    storage = open_storage(url)
    if not storage.copies or RemoteOptions().cache_folder() is not None:
        return storage
    folder = tempfile.mkdtemp(prefix="fastvid-relay-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return open_storage(url, options=RemoteOptions(cache=folder))


_MODEL: Final = "model"
_SHARED: Final = (
    "data.path", "data.split", "data.eval_split", "data.where", "data.generation", "run.epochs", "run.out", "sync",
)  # fmt: skip
"""Prefixes of the settings that must be the same for all models of a sweep."""


class Clips:
    """Trains the units of a stage on partitions of a dataset: the worker that `serve` calls."""

    def __init__(self, configs: Sequence[Config], num_partitions: int, device: torch.device) -> None:
        check_shared(configs)
        self.member = Member(World(), device)
        resolved = [open_datasets(config, None, self.member) for config in configs]
        self.configs = [config for config, _, _ in resolved]
        _, train, self.eval = resolved[0]
        assert not isinstance(train, Mixture)  # `Relay.check` has refused it
        self.train = train
        counts = samples_by_shard(self.train)
        self.parts = deal_shards(counts, num_partitions)
        self.sizes = [sum(counts[shard] for shard in part) for part in self.parts]
        self._storage = local_copies(self.train.storage.url)
        self._kept: dict[int, Partition] = {}
        self._held_out: Partition | None = None
        for config in self.configs:
            assemble.check_device(config, device)
            self._samples_per_epoch(config)

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        """See `serve`. Also loads the evaluation split, because any stage may train the last unit of an epoch."""
        former, self._kept = self._kept, {}
        moved = 0
        for part in partitions:
            self._kept[part] = former.get(part) or Partition(self.train, self.parts[part], self._storage)
            moved += 0 if part in former else self._kept[part].load()
        if self.eval is not None and self._held_out is None:
            shards = [shard for shard, count in enumerate(samples_by_shard(self.eval)) if count]
            self._held_out = Partition(self.eval, shards, self._storage)
            moved += self._held_out.load()
        return {"bytes_moved": moved}

    def visit(self, unit: Unit, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """See `serve`. A pure function of its arguments, so any stage can repeat the unit of a dead stage.

        Returns the new token; and JSON values: ``samples`` (number in this visit), the mean ``loss`` and the task's
        metrics, ``lr``, ``lineage`` (number and digest of the samples), and if the unit ends an epoch, ``score``
        (higher is better) and ``eval``. If loss or weights are not finite, returns an empty token and the ``reason``.
        """
        config, device = self.configs[unit.model], self.member.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            replica, state = self._open(unit, token)
            stepper = Stepper(config, self.member, Strategy(self.member))
            sums, before, lineage = None, replica.samples, Lineage()
            with contextlib.closing(self.loader(unit)) as loader:
                for batch in loader:
                    found, _ = stepper.step(replica, batch)
                    sums = found if sums is None else sums + found
                    replica.samples += batch.stop - batch.start
                    lineage.add(unit.epoch, *Lineage.of(batch))
            numbers = {LOSS: 0.0} if sums is None else config.task.row(sums.numbers())
            broken = replica.nonfinite() if math.isfinite(numbers[LOSS]) else [LOSS]
            if broken:
                return b"", {"reason": f"{broken[0]} is not finite after {replica.samples} samples"}
            report: dict[str, Any] = {"samples": replica.samples - before, **numbers, "lr": replica.lr}
            report["lineage"] = lineage.state_dict()
            state["visits"].append(unit.partition)
            if unit.ends_epoch:
                score = self._score(config, replica)
                report["eval"] = None if score is None else score.as_row()
                report["score"] = -numbers[LOSS] if score is None else score.value
                state["scores"].append(report["score"])
            data = encode({**state, "replica": replica.state_dict(), "rng": torch.get_rng_state()})
        return data, report

    def _open(self, unit: Unit, token: bytes | None) -> tuple[Replica, dict[str, Any]]:
        """Return the replica of a unit as its token left it, and the rest of the token."""
        replica = self.replica(unit.model, fresh=token is None)
        if token is None:
            torch.manual_seed(self.configs[unit.model].run.seed)
            if replica.average is not None:
                replica.average.restart(replica.model)
            return replica, {_MODEL: unit.model, "visits": [], "scores": []}
        state = decode(token, "token")
        if state[_MODEL] != unit.model or len(state["scores"]) != unit.epoch:
            raise StateError(
                f"token contains model {state[_MODEL]} after {len(state['scores'])} epochs, "
                f"but the unit is model {unit.model} in epoch {unit.epoch}"
            )
        replica.load_state_dict(state.pop("replica"))
        torch.set_rng_state(state.pop("rng"))
        return replica, state

    def replica(self, model: int, *, fresh: bool) -> Replica:
        """Return a model of the sweep before its first step; with `fresh`, its initial weights are loaded."""
        config = self.configs[model]
        replica = assemble.make_replica(config, self._samples_per_epoch(config), self.member)
        if fresh:
            assemble.load_initial_weights(config, replica.model)
        return replica

    def loader(self, unit: Unit) -> Loader:
        """Return the loader of a unit; each partition has its own seed for the order of samples, frames and crops."""
        run = self.configs[unit.model].run
        seeded = replace(run, seed=hash64(f"{run.seed}:{unit.partition}") >> 1)
        config = replace(self.configs[unit.model], run=seeded)
        loader = assemble.make_loader(config, self._kept[unit.partition], self.member, train=True)
        loader.clips.set_epoch(unit.epoch)
        return loader

    def _score(self, config: Config, replica: Replica) -> Score | None:
        if self._held_out is None:
            return None
        held_out = assemble.make_loader(config, self._held_out, self.member)
        with contextlib.closing(held_out) as loader, replica.averaged():
            return evaluate(config, replica.model, loader, self.member.device)

    def _samples_per_epoch(self, config: Config) -> int:
        size = config.data.global_batch_size
        if config.data.last != "drop":
            return sum(self.sizes)
        if min(self.sizes) < size:
            raise UsageError(
                f"data.global_batch_size is {size}, a partition has {min(self.sizes)} samples",
                hint="use fewer stages or smaller batches, or set data.last=keep",
            )
        return sum(samples - samples % size for samples in self.sizes)


def check_shared(configs: Sequence[Config]) -> None:
    """Raise UsageError unless the models of a sweep have the same settings of `_SHARED`."""
    if not configs:
        raise UsageError("sweep has no models", hint="return at least one Config from sweep()")
    settings = [flatten(to_json(config)) for config in configs]
    for name in differing(settings):
        if name.startswith(_SHARED):
            values = dict.fromkeys(repr(one.get(name)) for one in settings)
            raise UsageError(f"models of a sweep must share {name}, but it is {' and '.join(values)}")
