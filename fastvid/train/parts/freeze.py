"""Freezing of parts of a model, for the whole run or for the first epochs (transfer learning).

Parameters frozen for the whole run have requires_grad=False, so their backward is not computed. For parameters that
are unfrozen later, the gradient is computed and discarded before the step, because DistributedDataParallel fixes its
set of gradients on construction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastvid.errors import UsageError
from fastvid.train.parts.layers import heads

ALL_BUT_HEAD = "all-but-head"


class Freezer:
    """Freezes parts of a model.

    Frozen batch norms use their running statistics and do not update them.

    Args:
        model: The model to train; its heads are those of `fastvid.train.parts.layers.heads`.
        rules: ``PREFIX`` or ``PREFIX:EPOCHS`` each. Freezes the parameters whose name begins with PREFIX, or all but
            the heads for "all-but-head", for that many epochs (may be fractional), or without a number for the whole
            run.
        samples_per_epoch: Samples per epoch of the run.

    Raises:
        UsageError: If a rule matches no parameter or has no number after its colon, or if the rules freeze the whole
            model for the whole run.
    """

    def __init__(self, model: nn.Module, rules: Sequence[str], samples_per_epoch: int) -> None:
        until: dict[str, float] = {}
        head = tuple(f"{name}." for name, _ in heads(model))
        names = [name for name, _ in model.named_parameters()]
        for rule in rules:
            prefix, colon, number = rule.rpartition(":") if ":" in rule else (rule, "", "")
            samples = _epochs(rule, number) * samples_per_epoch if colon else math.inf
            chosen = [name for name in names if _inside(name, prefix, head)]
            if not chosen:
                raise UsageError(
                    f"optim.freeze has {rule!r}, which matches no parameter of the model",
                    hint=f"use one of {', '.join(_parts(names))}; or {ALL_BUT_HEAD}",
                )
            for name in chosen:
                until[name] = max(until.get(name, 0.0), samples)
        if until and len(until) == len(names) and all(math.isinf(samples) for samples in until.values()):
            raise UsageError(
                "optim.freeze freezes the whole model for the whole run",
                hint=f"leave a part trainable, for example with optim.freeze={ALL_BUT_HEAD}",
            )
        self._thawing = []
        for name, parameter in model.named_parameters():
            if math.isinf(until.get(name, 0.0)):
                parameter.requires_grad_(False)
            elif name in until:
                self._thawing.append((parameter, until[name]))
        # A norm is frozen as long as its weight.
        self._norms = [
            (module, until[f"{name}.weight"])
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and f"{name}.weight" in until
        ]

    def freeze_norms(self, samples: int) -> None:
        """Freeze batch norms for the step that starts after `samples` samples; call before forward."""
        for norm, until in self._norms:
            norm.train(samples >= until)

    def drop_gradients(self, samples: int) -> None:
        """Discard the gradients of frozen parameters; call it after backward, before clipping."""
        for parameter, until in self._thawing:
            if samples < until:
                parameter.grad = None


def _inside(name: str, prefix: str, head: tuple[str, ...]) -> bool:
    if prefix == ALL_BUT_HEAD:
        return not name.startswith(head)
    return name == prefix or name.startswith(f"{prefix}.")


def _epochs(rule: str, number: str) -> float:
    try:
        epochs = float(number)
    except ValueError:
        epochs = -1.0
    if not epochs >= 0:
        raise UsageError(f"optim.freeze has {rule!r}, expected PREFIX or PREFIX:EPOCHS")
    return epochs


def _parts(names: Sequence[str]) -> list[str]:
    """Return the first two components of the dotted names, without duplicates, in order."""
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
