"""The stage worker for datasets: keeps partitions in memory and trains the models of a sweep on them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.processes import World
from fastvid.storage import open_storage
from fastvid.train.config.config import Config, flatten, to_json
from fastvid.train.parts.evaluate import Score, evaluate
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import Member
from fastvid.train.run import assemble
from fastvid.train.run.assemble import open_datasets
from fastvid.train.strategies.relay.partition import Partition, deal_shards, samples_by_shard
from fastvid.train.strategies.relay.resident_storage import ResidentStorage
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.strategies.relay.visit import SweepModel, train_visit

_SHARED: Final = (
    "data.path", "data.split", "data.eval_split", "data.where", "data.generation", "run.epochs", "run.out", "sync",
)  # fmt: skip
"""Prefixes of the settings that all models of a sweep must share."""


class Clips:
    """A `fastvid.train.strategies.relay.stage.StageWorker` for the partitions of a dataset."""

    def __init__(self, configs: Sequence[Config], num_partitions: int, device: torch.device) -> None:
        check_shared(configs)
        self.member = Member(World(), device)
        resolved = [open_datasets(config, None, self.member) for config in configs]
        self.configs = [config for config, _, _ in resolved]
        _, train, self.eval = resolved[0]
        assert not isinstance(train, Mixture)  # `SweepOptions.of` has checked it
        self.train = train
        counts = samples_by_shard(self.train)
        self.parts = deal_shards(counts, num_partitions)
        self.sizes = [sum(counts[shard] for shard in part) for part in self.parts]
        self.cache = ResidentStorage(open_storage(self.train.storage.url))
        self._kept: dict[int, Partition] = {}
        self._held_out: Partition | None = None
        self._decoders: dict[int, str] = {}
        for config in self.configs:
            assemble.check_device(config, device)
            self._samples_per_epoch(config)

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        """See `StageWorker`. Also loads the evaluation split, because the stage that ends an epoch evaluates."""
        before = self.cache.bytes_moved
        self._kept = {
            part: self._kept.get(part) or Partition(self.train, self.parts[part], self.cache) for part in partitions
        }
        if self.eval is not None and self._held_out is None:
            shards = [shard for shard, count in enumerate(samples_by_shard(self.eval)) if count]
            self._held_out = Partition(self.eval, shards, self.cache)
        kept = [*self._kept.values(), *([self._held_out] if self._held_out else [])]
        self.cache.keep_only({name for partition in kept for name in partition.files})
        for partition in kept:
            partition.load()
        return {"bytes_moved": self.cache.bytes_moved - before}

    def visit(self, unit: Unit, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """See `StageWorker`."""
        before = self.cache.bytes_moved
        sweep_model = self.sweep_model(unit.model, fresh=token is None)
        data, report = train_visit(sweep_model, unit, token, self.member.device)
        return data, {**report, "bytes_moved": self.cache.bytes_moved - before}

    def sweep_model(self, model: int, *, fresh: bool) -> SweepModel:
        """Return a model of the sweep; with `fresh`, its initial weights are loaded."""
        config = self.configs[model]

        def build_replica() -> Replica:
            replica = assemble.make_replica(config, self._samples_per_epoch(config), self.member)
            if fresh:
                assemble.load_initial_weights(config, replica.model)
            return replica

        @contextlib.contextmanager
        def batches(unit: Unit) -> Iterator[Iterable[Batch]]:
            seed = partition_seed(config.run.seed, unit.partition)
            seeded = replace(self._decoding(model), run=replace(config.run, seed=seed))
            loader = assemble.train_loader(seeded, self._kept[unit.partition], self.member)
            try:
                loader.clips.set_epoch(unit.epoch)
                yield loader
                self._decoders[model] = loader.clips.backend.name
            finally:
                loader.clips.close()

        return SweepModel(config, build_replica, batches, None if self.eval is None else self._evaluate(model))

    def _decoding(self, model: int) -> Config:
        """Return the settings with the decoder that "auto" chose in the model's first visit."""
        config = self.configs[model]
        decoder = self._decoders.get(model, config.data.decoder)
        return replace(config, data=replace(config.data, decoder=decoder))

    def _evaluate(self, model: int) -> Any:
        config = self._decoding(model)

        def score(replica: Replica) -> Score:
            assert self._held_out is not None
            data = assemble.eval_data(config, self._held_out, self.member)
            try:
                with replica.averaged():
                    return evaluate(
                        replica.model,
                        data.loader,
                        total=data.total,
                        device=self.member.device,
                        amp=config.run.amp,
                        task=config.task,
                        seed=config.run.seed,
                    )
            finally:
                assert isinstance(data.loader, assemble.Labelled)
                data.loader.clips.close()

        return score

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


def partition_seed(seed: int, partition: int) -> int:
    """Return the seed of order, frames and crops on a partition, 0 to 2**63 - 1."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{partition}".encode(), digest_size=8).digest(), "little") >> 1


def check_shared(configs: Sequence[Config]) -> None:
    """Check that models can train on the same partitions."""
    if not configs:
        raise UsageError("sweep has no models", hint="return at least one Config from sweep()")
    first, *others = (flatten(to_json(config)) for config in configs)
    for other in others:
        for name in sorted(first.keys() | other.keys()):
            if name.startswith(_SHARED) and first.get(name) != other.get(name):
                raise UsageError(
                    f"models of a sweep must share {name}, but it is {first.get(name)!r} and {other.get(name)!r}"
                )
