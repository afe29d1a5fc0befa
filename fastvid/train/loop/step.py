"""One step of a replica on a batch: forward and backward of micro-batches, clipping, update."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastvid.load.batch.batch import Batch
from fastvid.models import ghost
from fastvid.train.config.config import Config
from fastvid.train.config.optim import OptimConfig
from fastvid.train.config.run import RunConfig
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.evaluate import autocast
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks.elastic import Member
from fastvid.train.records.exposure import Exposure
from fastvid.train.tasks.classification import Classification
from fastvid.train.tasks.sums import Sums
from fastvid.train.tasks.task import Phase, Task


@dataclass(frozen=True)
class Stepper:
    """Runs training steps."""

    optim: OptimConfig
    run: RunConfig
    member: Member
    strategy: Strategy
    group_size: int = 1
    ghost_norm: bool = False
    exposure: Exposure | None = None
    task: Task = field(default_factory=Classification)

    @classmethod
    def of(cls, config: Config, member: Member, strategy: Strategy, exposure: Exposure | None = None) -> Stepper:
        """Return the stepper of a configuration."""
        groups, ghosts = config.data.group_size, config.model.ghost_norm
        return cls(config.optim, config.run, member, strategy, groups, ghosts, exposure, config.task)

    def step(self, replica: Replica, batch: Batch) -> tuple[Sums, Tensor | None]:
        """Train a replica on this rank's share of a batch.

        The loss is the weighted sum of the clips' losses, times `Strategy.loss_scale`. Up to rounding it does
        not depend on how the share is split into micro-batches, unless a layer such as batch norm combines several
        clips.

        Returns sums over the share's scored rows, see `Task.measure`; and the norm of the gradient before
        clipping, or None without clipping.
        """
        device = self.member.device
        _seed(step_seed(self.run.seed, replica.samples, self.member.world.rank), device)
        replica.set_lr()
        replica.optimizer.zero_grad(set_to_none=True)
        # Computed from `valid`, because `batch.weight` is rounded to float32.
        weight = batch.valid.double() / (batch.stop - batch.start)
        scale = self.strategy.loss_scale(weight.sum())
        weight = weight * scale
        batch = self.task.prepare(batch, Phase(training=True, seed=self.run.seed, group_size=self.group_size))
        if replica.freezer is not None:
            replica.freezer.freeze_norms(replica.samples)
        sums: Sums | None = None
        slices = micro_batches(batch.num_rows, self.run.micro_batch_size, self.group_size)
        # Autocast forgets its half-precision weights when the outermost context ends. This one keeps them for all
        # micro-batches; it is disabled, because backward must not run under autocast.
        with torch.autocast(device.type, enabled=False):
            for rows in slices:
                part = batch.rows(rows)
                with self.strategy.accumulate(replica, last=rows is slices[-1]):
                    with autocast(device, self.run.amp):
                        outputs = replica.forward(*self.task.inputs(part))
                    losses = self.task.losses(outputs, part)
                    loss = (losses * weight[rows].to(losses.dtype)).sum()
                    torch.autograd.backward(replica.scaler.scale(loss))
                    if self.exposure is not None and rows is slices[-1]:
                        self.exposure.backward_ended()
                found = self.task.sums(outputs, part, losses)
                sums = found if sums is None else sums + found
        assert sums is not None
        if replica.freezer is not None:
            replica.freezer.drop_gradients(replica.samples)
        norm = None
        if self.optim.clip_norm is not None:
            replica.scaler.unscale_(replica.optimizer)
            norm = nn.utils.clip_grad_norm_(replica.model.parameters(), self.optim.clip_norm)
        replica.scaler.step(replica.optimizer)
        replica.scaler.update()
        if self.ghost_norm:
            ghost.update_running_stats(replica.model, scale * batch.num_rows / (batch.stop - batch.start))
        with self.exposure.waiting() if self.exposure is not None else contextlib.nullcontext():
            self.strategy.maybe_sync(replica, sums)
        replica.stepped(batch.stop - batch.start)
        if self.strategy.has_one_model():
            replica.update_average()
        return sums, norm


def micro_batches(rows: int, limit: int | None, group: int = 1) -> list[slice]:
    """Return the fewest slices of at most `limit` rows that cover all rows; one slice if `limit` is None.

    Their sizes differ by at most one group, and a group of `group` rows is never split.
    """
    groups, most = -(-rows // group), max(1, (limit or rows) // group)
    parts = -(-groups // most)
    ends = [min(rows, groups * part // parts * group) for part in range(parts + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout draws from.

    `torch.manual_seed` is not used: without CUDA it queues a call with a formatted stack trace each time and never
    frees it (torch 2.13).
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def step_seed(seed: int, samples: int, rank: int) -> int:
    """Return the dropout seed of a step, a function of the run's seed, the samples seen and the rank.

    A resumed run thus draws the same numbers, and checkpoints need no generator state.
    """
    text = f"{seed}:{samples}:{rank}".encode()
    # 63 bits: torch refuses larger seeds.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
