"""The configuration of the optimizer and of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastvid.errors import UsageError
from fastvid.train.config.section import at_least, one_of, one_of_or_own

OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "lars", "lamb"]
Groups = Literal["plain", "tsm"]
Decay = Literal["constant", "step", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its parameter groups and its learning rate as a function of the samples seen.

    The rate is ``base_lr * global_batch_size / base_batch_size``, the linear scaling rule of Goyal et al. 2017, times
    the factor of warm-up and decay. Epochs are counted in samples, so the schedule is independent of the world size.

    Attributes:
        base_lr: Learning rate at `base_batch_size`.
        base_batch_size: Global batch size, in clips, that `base_lr` was tuned for.
        name: "sgd", "adam" (L2 regularization), "adamw" (decoupled weight decay), "adagrad", "lars" (SGD with
            layer-wise rates) or "lamb" (AdamW with layer-wise rates), see `fastvid.train.parts.optim_large`. Or
            ``module:name``, called with the parameter groups, with ``lr`` if it accepts that, and with `options`; it
            returns a `torch.optim.Optimizer` of these groups.
        options: Keyword arguments of an optimizer named as ``module:name``; it gets no other settings of this section.
        momentum: Momentum of SGD and LARS.
        nesterov: Whether SGD uses Nesterov momentum.
        trust: Trust coefficient of LARS: fraction of a layer's weight norm that a step at rate 1 moves.
        beta1: Decay rate of Adam's first moment.
        beta2: Decay rate of Adam's second moment.
        eps: Added to the square root of the second moment in Adam and AdaGrad.
        weight_decay: Weight decay of convolution and linear weights.
        groups: "plain" applies no weight decay to biases and norm layers; "tsm" adds TSM's rate multipliers.
        no_decay: Parameters without weight decay, besides those that the model's own ``no_weight_decay()`` names, as
            timm's models do: each is a part of a dotted name. The default are the position and class tokens of vision
            transformers, as timm and transformers name them.
        warmup_epochs: Epochs of linear warm-up; may be fractional.
        warmup_start: Fraction of the rate at which warm-up starts.
        decay: Schedule after warm-up: "constant", "step" or "cosine". Or ``module:name``: a pure function of the
            progress from the end of warm-up (0) to the end of the run (1), in samples, and of `decay_options`, that
            returns the factor of the rate, such as 1 at first and 0 at the end.
        decay_options: Keyword arguments of a schedule named as ``module:name``.
        milestones: Epochs at which "step" multiplies the rate by `gamma`.
        gamma: Factor of "step".
        final: Fraction of the rate at which "cosine" ends.
        clip_norm: Maximum norm of the whole gradient; None disables clipping.
        ema_decay: Decay of an exponential moving average of the weights for each step of `base_batch_size` clips; a
            larger batch counts as several such steps. Evaluation uses the average. None disables it.
        head_lr_mult: Multiplier of the rate of the last layer, or of both streams' last layers, in addition to those of
            `groups`.
        layer_decay: Multiplier of the rate from each layer to the one below, 0 < x <= 1, for fine-tuning; see
            `fastvid.train.parts.layers`. None for none.
        freeze: Frozen parts: ``PREFIX`` for the whole run, or ``PREFIX:EPOCHS``; see `fastvid.train.parts.freeze`.
    """

    base_lr: float
    base_batch_size: int
    name: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    momentum: float = 0.9
    nesterov: bool = False
    trust: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4
    groups: Groups = "plain"
    no_decay: tuple[str, ...] = (
        "cls_token", "dist_token", "distillation_token", "mask_token", "pos_embed", "position_embeddings",
        "time_embeddings",
    )  # fmt: skip
    warmup_epochs: float = 0.0
    warmup_start: float = 0.1
    decay: str = "step"
    decay_options: Mapping[str, Any] = field(default_factory=dict)
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    final: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None
    head_lr_mult: float = 1.0
    layer_decay: float | None = None
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, self, "base_batch_size")
        at_least(0.0, self, "base_lr", "momentum", "weight_decay", "warmup_epochs", "warmup_start", "gamma", "final")
        at_least(0.0, self, "trust", "head_lr_mult")
        one_of_or_own(self, "name", OptimizerName, self.options, "options")
        one_of_or_own(self, "decay", Decay, self.decay_options, "decay_options")
        one_of(self, "groups", Groups)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UsageError(f"optim.milestones is {self.milestones}, expected ascending epochs")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UsageError(f"optim.clip_norm is {self.clip_norm}, expected more than 0, or none")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UsageError(f"optim.layer_decay is {self.layer_decay}, expected 0 < x <= 1, or none")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UsageError(f"optim.ema_decay is {self.ema_decay}, expected 0 <= x < 1, or none")
