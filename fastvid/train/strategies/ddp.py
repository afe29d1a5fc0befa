"""Synchronous data parallelism: gradients are averaged over all ranks in every step.

Each rank computes its share of the global batch. Its loss is the sum of its clips' losses times world size / global
batch size: DistributedDataParallel averages over the ranks, which divides by the world size. The result is the gradient
of the mean loss over the global batch, even if shares differ in size.

In training, each rank computes norm statistics from its own clips; a checkpoint and an evaluation use their mean over
the ranks. Running statistics are linear in the batches' statistics, so it does not matter how often they are averaged.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fastvid.errors import UsageError
from fastvid.runtime.values import check_choice
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.average import Averager


class Ddp(Strategy):
    """The strategy ``sync=ddp``, without state.

    Args:
        member: This process.
        gradients: Type in which gradients are communicated: "fp32" (unchanged), "fp16", or "bf16", which requires CUDA.

    Raises:
        UsageError: If the type is unknown or the backend cannot reduce it.
    """

    steps_alike = True

    def __init__(self, member: Member, *, gradients: str = "fp32") -> None:
        super().__init__(member)
        check_choice("sync_options.gradients", gradients, _HOOKS)
        self._gradients, self._hook = gradients, _HOOKS[gradients]

    def prepare(self, replica: Replica) -> None:
        # Not in `__init__`, because a dry run need not be on the device of the run.
        if self._gradients == "bf16" and self.member.device.type != "cuda":
            raise UsageError("sync_options.gradients is 'bf16', which gloo cannot reduce", hint="use fp16, or CUDA")
        super().prepare(replica)
        if self.world_size == 1:
            return
        # static_graph is not used: with no_sync in the first step it computes wrong gradients and fails an internal
        # assertion (torch 2.13).
        replica.forward = DistributedDataParallel(
            replica.model,
            device_ids=[self.member.device] if self.member.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_KEEP_BUFFERS,
        )
        if self._hook is not None:
            replica.forward.register_comm_hook(None, self._hook)

    def settle(self, replica: Replica) -> bool:
        statistics = [
            buffer
            for model in (replica.model, replica.average)
            for module in (() if model is None else model.modules())
            for name in ("running_mean", "running_var")
            if isinstance(buffer := getattr(module, name, None), Tensor)
        ]
        if self.world_size > 1 and statistics:
            Averager([], statistics, self.world_size).average()
        return True


# The sum does not overflow in half precision: losses are means over the global batch, and the hooks divide gradients by
# the world size before the sum.
_HOOKS: dict[str, Any] = {"fp32": None, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}

# Disables the broadcast of buffers in each forward. Up to torch 2.12 the argument is broadcast_buffers.
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"): False
}
