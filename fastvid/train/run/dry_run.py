"""Check a run without a GPU and without training: files, labels, weights, steps, memory.

Memory is an estimate. Weights, gradients and optimizer state are exact; activations are the tensors that autograd saves
for backward, counted by a forward on the meta device and halved for mixed precision. Workspace and fragmentation are
not included; in our experience they add 10 to 20 %.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.order.epoch import rank_slice
from fastvid.load.order.mixture import parts_of
from fastvid.models.zoo import UNCOUNTED, model_cost
from fastvid.runtime.processes import World
from fastvid.storage import LocalStorage
from fastvid.train.config.config import Config
from fastvid.train.loop.loop import Trainer, micro_batches
from fastvid.train.loop.strategy import build_strategy, strategy_of
from fastvid.train.parts.optim import state_per_weight
from fastvid.train.ranks import Member
from fastvid.train.run import assemble
from fastvid.train.tasks.task import Task

log = logging.getLogger(__name__)

_GIB: Final = 2**30


def check(
    configs: Sequence[Config], world_size: int = 1, *, model: assemble.ModelSource | None = None
) -> list[dict[str, Any]]:
    """Check a run and return what is known before it starts, such as steps, learning rates and memory.

    It builds the run with the same functions as training, which raise the same errors. What depends on the device is
    not checked. Returns one entry per configuration.
    """
    kinds = [strategy_of(config) for config in configs]
    kinds[-1].rehearse(configs, world_size)
    return [
        _check_model(config, world_size, world_size if kind.shares_batches else 1, model)
        for config, kind in zip(configs, kinds, strict=True)
    ]


def _check_model(config: Config, world_size: int, sharing: int, source: assemble.ModelSource | None) -> dict[str, Any]:
    """Check one model, whose batches are divided among `sharing` ranks."""
    member = Member(World(), torch.device("cpu"))
    run = assemble.Run.of(config, member, Member(World(0, sharing), member.device), source)
    config, train_set, eval_set, model = run.config, run.train_set, run.eval_set, run.replica.model
    if run.state is not None:
        strategy = build_strategy(config.sync, member, config.sync_options)
        Trainer(config, member, run.replica, run.loader, strategy).load_state_dict(run.state)
    run.loader.close()
    if run.eval_data is not None:
        run.eval_data.close()
    sets = parts_of(train_set)
    shards = [size for dataset in sets for size in check_files(dataset).values()]
    data = config.data
    batches = run.loader.clips.batches
    per_epoch = assemble.samples_per_epoch(run.loader.clips)
    _check_folder("run.out", Path(config.run.out))
    checkpoints = assemble.checkpoints_of(config).storage
    if config.run.checkpoints and isinstance(checkpoints, LocalStorage):
        _check_folder("run.checkpoints", checkpoints.root)
    first, end = rank_slice(batches.size, sharing - 1, sharing, data.group_size)
    rows = end - first
    slices = micro_batches(rows, config.run.micro_batch_size, data.group_size)
    schedule = run.replica.schedule
    steps = batches.count(0)
    return {
        "dataset": " + ".join(dataset.storage.url for dataset in sets),
        "generation": " + ".join(str(dataset.generation.number) for dataset in sets) if sets[1:] else data.generation,
        "shards": len(shards),
        "shard_bytes": sum(shards),
        "train_samples": len(train_set),
        "eval_samples": None if eval_set is None else len(eval_set),
        "classes": config.model.num_classes,
        "world_size": world_size,
        "clips_per_rank": rows,
        "micro_batches": len(slices),
        "steps_per_epoch": steps,
        "steps": steps * config.run.epochs,
        "samples_dropped_per_epoch": batches.num_samples - per_epoch,
        "lr_first": schedule.lr(0),
        "lr_highest": max(schedule.lr(round(schedule.total * part / 200)) for part in range(200)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **_cost(config, model, rows, max(part.stop - part.start for part in slices), per_epoch),
    }


def _cost(config: Config, model: nn.Module, rows: int, micro: int, per_epoch: int) -> dict[str, Any]:
    """Return FLOPs and memory; empty for models that take other than RGB clips, or that the meta device cannot run."""
    shape = config.data.clip_shape
    if shape is None or type(config.task).inputs is not Task.inputs:
        return {}
    try:
        cost = model_cost(model, shape)
        memory = estimate(config, model, rows=rows, micro=micro, shape=shape)
    except UNCOUNTED as error:
        log.warning("multiply-adds and memory are unknown: %s", error)
        return {}
    return {
        "gmacs_per_clip": cost.macs / 1e9,
        "pflops": cost.training_flops * per_epoch * config.run.epochs / 1e15,
        "checkpoint_bytes": memory["weights"] + memory["optimizer"],
        "memory_gib": round(sum(memory.values()) / _GIB, 2),
        "memory_bytes": memory,
    }


def check_files(dataset: Dataset) -> dict[str, int]:
    """Return the size in bytes of each shard's tar, or list of videos, by name; FormatError if one has another size."""
    sizes = {}
    for shard in dataset.generation.shards:
        name = shard.data
        sizes[name] = dataset.storage.size(name)
        if sizes[name] != shard.bytes:
            raise FormatError(
                f"shard has {sizes[name]} bytes, expected {shard.bytes}",
                file=f"{dataset.storage.url}/{name}",
                hint="run `fastvid verify` to see what is damaged",
            )
    return sizes


def estimate(config: Config, model: nn.Module, *, rows: int, micro: int, shape: tuple[int, ...]) -> dict[str, int]:
    """Estimate the bytes on one rank's device by purpose, see the module docstring.

    `rows`: clips of a rank's share of a batch. `micro`: clips of a micro-batch. `shape`: of one clip, [1, 3, T, H, W].
    """
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    trainable = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = round(state_per_weight(config.optim) * trainable) + (weights if config.optim.ema_decay is not None else 0)
    # Of a whole micro-batch, because layers may combine clips, as ghost norm does.
    kept = activation_bytes(model, (micro, *shape[1:]))
    if config.run.amp != "off":
        kept //= 2
    clip = 4 * math.prod(shape)
    return {
        "weights": weights,
        "gradients": trainable,  # DDP's buckets share this memory
        "optimizer": moments,
        "activations": kept,
        "batches": clip * rows,
    }


def activation_bytes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the number of bytes that autograd saves for a batch of `shape`, without weights; uses the meta device."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {
        name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in state.items()
    }
    own = {tensor.untyped_storage()._cdata for tensor in on_meta.values()}
    # Keep the tensors alive, so that no two storages have the same address.
    alive: list[Tensor] = []
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            alive.append(tensor)
            found[storage._cdata] = storage.nbytes()
        return tensor

    training = model.training
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(model, on_meta, (torch.empty(shape, device="meta"),))
    finally:
        model.train(training)
    return sum(found.values())


def _check_folder(name: str, path: Path) -> None:
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not folder.is_dir():
        raise UsageError(f"{name} is inside a file", file=folder, hint=f"choose a {name} whose parents are folders")
    free = shutil.disk_usage(folder).free
    if free < _GIB:
        log.warning("only %.1f GB are free for %s in %s", free / 1e9, name, folder)
