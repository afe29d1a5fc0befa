"""Ghost batch norm: statistics over fixed groups of clips, however a batch is split.

Plain batch norm normalises over the clips that a rank processes together, so changing the number of ranks or the size
of the micro-batch changes the model that is trained. Here each group of consecutive clips has its own mean and
variance (Hoffer et al. 2017, "Train longer, generalize better", section 4, "Ghost Batch Normalization"), and a loader
with the same ``group_size`` never splits a group. A step's gradient is then the same at any world size, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fastvid.errors import UsageError


@dataclass
class GhostGroups:
    """How the current batch is split into groups; all layers of a model share one object."""

    size: int  # clips per group
    count: int = 1  # groups in the batch


class GhostBatchNorm(_BatchNorm):
    """Batch norm over groups of rows.

    Parameters, buffers and evaluation mode are those of `nn.BatchNorm2d`. The rows of the input [N, C, ...] are ordered
    by clip, so with G groups in the batch a group is N / G consecutive rows. `update_running` updates the running
    statistics once per step, with the mean of the groups' means and variances.
    """

    def __init__(self, like: _BatchNorm, groups: GhostGroups) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.weight, self.bias = like.weight, like.bias
        self.running_mean, self.running_var = like.running_mean, like.running_var
        self.num_batches_tracked = like.num_batches_tracked
        self.training = like.training
        self.groups = groups
        # Sums of the means and variances of the groups seen in this step, and the number of those groups.
        self._mean, self._var, self._seen = torch.zeros(0), torch.zeros(0), 0

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        """Accept any [N, C, ...]."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        assert self.running_mean is not None
        assert self.running_var is not None
        groups = self.groups.count
        assert len(input) % groups == 0, (len(input), self.groups)
        if not self._seen:
            self._mean, self._var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        # With momentum 1 batch_norm sets `mean` and `var` to the groups' own means and unbiased variances.
        mean, var = self.running_mean.new_zeros(2, groups * self.num_features).unbind()
        weight, bias = (None if own is None else own.repeat(groups) for own in (self.weight, self.bias))
        out = functional.batch_norm(_side_by_side(input, groups), mean, var, weight, bias, True, 1.0, self.eps)
        # Add to the sums only at the end: activation checkpointing may abort its second run before this line.
        self._mean += mean.view(groups, -1).sum(0)
        self._var += var.view(groups, -1).sum(0)
        self._seen += groups
        return _one_after_another(out, groups)

    @torch.no_grad()
    def update_running(self, share: Tensor | float) -> None:
        """Update the running statistics; see `update_running_stats`."""
        if not self._seen or self.running_mean is None or self.running_var is None:
            return
        momentum = 0.1 if self.momentum is None else self.momentum
        for running, total in ((self.running_mean, self._mean), (self.running_var, self._var)):
            # `share` may be a tensor on a device, and the argument `alpha` of `add_` would wait for its value.
            running.mul_(1.0 - momentum).add_(total * (momentum * share / self._seen))
        self._seen = 0


def _side_by_side(rows: Tensor, groups: int) -> Tensor:
    """Turn [groups * n, C, ...] into [n, groups * C, ...], so that one batch norm treats each group by itself."""
    if groups == 1:
        return rows
    apart = rows.movedim(1, -1) if _is_channels_last(rows) else rows
    apart = apart.reshape(groups, -1, *apart.shape[1:])
    if _is_channels_last(rows):
        return apart.movedim(0, -2).flatten(-2).movedim(-1, 1)
    return apart.transpose(0, 1).flatten(1, 2)


def _one_after_another(columns: Tensor, groups: int) -> Tensor:
    """Undo `_side_by_side`: turn [n, groups * C, ...] into [groups * n, C, ...], in the same memory format."""
    if groups == 1:
        return columns
    if _is_channels_last(columns):
        apart = columns.movedim(1, -1)
        return apart.reshape(*apart.shape[:-1], groups, -1).movedim(-2, 0).flatten(0, 1).movedim(-1, 1)
    rows, _, *rest = columns.shape
    return columns.reshape(rows, groups, -1, *rest).transpose(0, 1).flatten(0, 1)


def _is_channels_last(rows: Tensor) -> bool:
    """Return whether the channels of one pixel are adjacent in memory: the channels-last memory format."""
    return rows.ndim > 2 and not rows.is_contiguous() and rows.movedim(1, -1).is_contiguous()


def use_ghost_norm(model: nn.Module, group_size: int) -> nn.Module:
    """Replace a model's batch norms in place; keys and values of its state dict stay the same.

    `model`: maps clips [B, C, T, H, W] to logits. In training B must be a multiple of `group_size`, the clips per
    group. Returns the model.
    """
    groups = GhostGroups(group_size)
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
            raise UsageError(f"{clips} clips cannot be split into groups of {group_size}")
        groups.count = max(1, clips // group_size)

    model.register_forward_pre_hook(count)
    return model


def update_running_stats(model: nn.Module, share: Tensor | float = 1.0) -> None:
    """Update the running statistics of all ghost batch norms from the batches seen since the last call.

    `share`: factor of the update: the number of ranks times this rank's fraction of the global batch. The mean of the
    running statistics over the ranks is then the update with all groups of the batch; 1 with one rank.
    """
    for module in model.modules():
        if isinstance(module, GhostBatchNorm):
            module.update_running(share)
