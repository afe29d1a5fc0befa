"""Ghost batch norm: statistics over fixed groups of clips, so that they do not depend on how a batch is cut.

Plain batch norm normalises by whatever a rank happens to hold, so another number of ranks, or another micro-batch,
trains another model. Here each group of neighbouring clips has its own mean and variance (Hoffer et al. 2017, "Train
longer, generalize better", section 4, "Ghost Batch Normalization"), and a loader with that ``group_size`` never parts
a group. With it, a step's gradient is the same in any world, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fastvid.errors import UsageError


@dataclass
class Groups:
    """How the batch under way is cut; one object for all layers of a model.

    Attributes:
        size: Clips of a group.
        count: Groups of the batch that the model was called with last.
    """

    size: int
    count: int = 1


class GhostBatchNorm(_BatchNorm):
    """Batch norm over groups of rows; parameters, buffers and evaluation are those of `nn.BatchNorm2d`.

    Rows [N, C, ...] of the clips of a batch lie clip by clip, so that a group is a run of N / groups rows. Running
    statistics move once a step, in `update`, by the mean of the groups' means and variances.
    """

    def __init__(self, like: _BatchNorm, groups: Groups) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.weight, self.bias = like.weight, like.bias
        self.running_mean, self.running_var = like.running_mean, like.running_var
        self.num_batches_tracked = like.num_batches_tracked
        self.training = like.training
        self.groups = groups
        # Sums over the groups of a step: means, variances, and how many.
        self._mean, self._var, self._seen = torch.zeros(0), torch.zeros(0), 0

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        """Any rows of channels."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        assert self.running_mean is not None
        assert self.running_var is not None
        assert len(input) % self.groups.count == 0, (len(input), self.groups)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        if not self._seen:
            self._mean, self._var = torch.zeros_like(mean), torch.zeros_like(var)
        out, means, variances = [], torch.zeros_like(mean), torch.zeros_like(mean)
        for rows in input.tensor_split(self.groups.count):
            # A momentum of one leaves the group's own statistics in the buffers; the variance is the unbiased one.
            out.append(functional.batch_norm(rows, mean, var, self.weight, self.bias, True, 1.0, self.eps))
            means += mean
            variances += var
        # All or nothing: activation checkpointing may stop its second run inside the loop.
        self._mean += means
        self._var += variances
        self._seen += self.groups.count
        return torch.cat(out)

    @torch.no_grad()
    def update(self, share: float) -> None:
        """Moves the running statistics; see `update`."""
        if not self._seen or self.running_mean is None or self.running_var is None:
            return
        momentum = 0.1 if self.momentum is None else self.momentum
        for running, total in ((self.running_mean, self._mean), (self.running_var, self._var)):
            running.mul_(1.0 - momentum).add_(total, alpha=momentum * share / self._seen)
        self._seen = 0


def use_ghost_norm(model: nn.Module, group_size: int) -> nn.Module:
    """Replaces the batch norms of a model in place; keys and values of its state dict stay.

    Args:
        model: Clips [B, C, T, H, W] to logits. In training B is a multiple of `group_size`.
        group_size: Clips of a group.

    Returns:
        The model.

    Raises:
        UsageError: The model has no batch norm with running statistics.
    """
    groups = Groups(group_size)
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and child.running_mean is not None:
                setattr(parent, name, GhostBatchNorm(child, groups))
                found += 1
    if not found:
        raise UsageError("model.ghost_norm is set, but the model has no batch norm")

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        clips = len(inputs[0])
        if module.training and clips % group_size:
            raise UsageError(f"{clips} clips cannot be cut into groups of {group_size}")
        groups.count = max(1, clips // group_size)

    model.register_forward_pre_hook(count)
    return model


def update(model: nn.Module, share: float = 1.0) -> None:
    """Moves the running statistics of all ghost batch norms by the batches seen since the last call.

    Args:
        model: Any model.
        share: This process' clips over the mean of all processes' in this step. The mean of the processes' statistics
            then is what one process would have with the whole batch, because the update is linear.
    """
    for module in model.modules():
        if isinstance(module, GhostBatchNorm):
            module.update(share)
