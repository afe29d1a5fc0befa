"""Reject the ways in which torch's DataLoader and Accelerate would use a loader or a sampler wrongly.

torch's DataLoader collates what an iterable yields and copies the iterable into worker processes; Accelerate, which the
Hugging Face Trainer uses, shares the batches of every DataLoader among the ranks. A loader of fastvid has done all of
that already; doing it again would deliver clips twice, or drop them silently.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.runtime.processes import World


def check_use(part: object, world: World, *, found: bool) -> None:
    """Raise UsageError if a DataLoader or Accelerate is about to iterate wrongly over `part`, a loader or sampler.

    `found`: whether `world` was taken from the process group or environment, not given by the user.
    """
    name = type(part).__name__
    if get_worker_info() is not None:
        told = f"a DataLoader with worker processes iterates over this {name}, so each process would deliver every clip"
        raise UsageError(told, hint="use num_workers=0: a ClipLoader has its own workers, see its workers=")
    if found and dist.is_available() and dist.is_initialized() and world != World.resolve(None, None):
        raise UsageError(
            f"the {name} was made for rank {world.rank} of {world.size}, before this process became rank"
            f" {dist.get_rank()} of {dist.get_world_size()}",
            hint=f"make the {name} after the process group, or give it rank= and world_size=",
        )
    if world.size > 1 and _is_shared_again(part):
        raise UsageError(
            f"Accelerate would share the batches of this {name} among the ranks, as it has done itself",
            hint="give `prepare` the ClipLoader itself, not a DataLoader of it; in a Hugging Face Trainer override"
            " `get_train_dataloader` to return the ClipLoader; make an ExactSampler with rank=0, world_size=1",
        )


def _is_shared_again(part: object) -> bool:
    """Return whether Accelerate is iterating over a data loader that shares out the items of `part`."""
    library = sys.modules.get("accelerate.data_loader")
    active = library.GradientState().active_dataloader if library is not None else None
    if library is None or active is None:
        return False
    if isinstance(active, library.DataLoaderDispatcher):
        return active.dataset is part
    if isinstance(active.dataset, library.IterableDatasetShard):
        return active.dataset.dataset is part
    sharer = active.batch_sampler
    return isinstance(sharer, library.BatchSamplerShard) and getattr(sharer.batch_sampler, "sampler", None) is part


def collate_batches(batches: Sequence[Batch], **_of_torch: Any) -> Batch:
    """Return the only batch of the list; several are an error, because batches are not collated again."""
    if len(batches) != 1:
        hint = "use DataLoader(loader, batch_size=None); in a Trainer per_device_train_batch_size=1"
        raise UsageError(f"a DataLoader collates {len(batches)} batches of a ClipLoader", hint=hint)
    return batches[0]


# `default_collate` looks up types here before it collates a mapping entry by entry.
default_collate_fn_map[Batch] = collate_batches
