"""One step of one replica on one batch: micro-batches forward and backward, clipping, the optimiser."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastvid.load.batch import Batch
from fastvid.train.config import OptimConfig, RunConfig
from fastvid.train.elastic import Member
from fastvid.train.evaluate import autocast, count
from fastvid.train.replica import Replica
from fastvid.train.sync import Strategy

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stepper:
    """How a replica steps.

    Attributes:
        optim: Clipping and label smoothing.
        run: Precision, micro-batch and seed.
        member: This process.
        strategy: How replicas agree.
    """

    optim: OptimConfig
    run: RunConfig
    member: Member
    strategy: Strategy

    def step(self, replica: Replica, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Moves a replica by this rank's share of a batch.

        The loss is the sum of the clips' cross-entropies, each times its weight, times what the strategy says. It does
        not depend on how the share is cut into micro-batches, up to rounding, as long as no layer looks at several
        clips at once, as batch norm does.

        Returns:
            Sums over the share's valid rows, see `fastvid.train.evaluate.count`; and the norm of the gradient before
            clipping, None when nothing is clipped.
        """
        device = self.member.device
        torch.manual_seed(step_seed(self.run.seed, replica.samples, self.member.world.rank))
        replica.set_lr()
        replica.optimizer.zero_grad(set_to_none=True)
        # The batch's own weights, not rounded to float32.
        weight = batch.valid.double() / (batch.stop - batch.start)
        weight = weight * self.strategy.loss_scale(weight.sum())
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        slices = micro_batches(len(batch), self.run.micro_batch_size)
        for rows in slices:
            label = batch.label[rows]
            with self.strategy.accumulate(replica, last=rows is slices[-1]):
                with autocast(device, self.run.amp):
                    logits = replica.forward(batch.video[rows])
                logits = logits.float() if logits.dtype in HALVES else logits
                losses = functional.cross_entropy(
                    logits, label, reduction="none", label_smoothing=self.optim.label_smoothing
                )
                loss = (losses * weight[rows].to(losses.dtype)).sum()
                torch.autograd.backward(replica.scaler.scale(loss))
            sums += count(logits.detach(), label, batch.valid[rows])
        norm = None
        if self.optim.clip_norm is not None:
            replica.scaler.unscale_(replica.optimizer)
            norm = nn.utils.clip_grad_norm_(replica.model.parameters(), self.optim.clip_norm)
        replica.scaler.step(replica.optimizer)
        replica.scaler.update()
        self.strategy.maybe_sync(replica, sums)
        return sums, norm


def micro_batches(rows: int, limit: int | None) -> list[slice]:
    """The fewest slices of at most `limit` rows, their sizes differing by one at most; all rows at once without one."""
    parts = 1 if limit is None else -(-rows // limit)
    return [slice(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def step_seed(seed: int, samples: int, rank: int) -> int:
    """Seed of a step's dropout: a function of the run's seed, the samples seen and the rank.

    So a run that goes on from a checkpoint draws what it would have drawn, and the generator's state is not part of it.
    """
    text = f"{seed}:{samples}:{rank}".encode()
    # 63 bits: torch refuses larger seeds.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
