"""Parts of a model that do not move, for ever or for the first epochs: transfer learning.

What never thaws needs no gradient, so its backward is not computed. What thaws later is computed all along and its
gradient is thrown away before the step: DistributedDataParallel fixes the set of gradients when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastvid.errors import UsageError

ALL_BUT_HEAD = "all-but-head"


class Freezer:
    """Keeps parts of a model as they are.

    Frozen batch norms use, and keep, their running statistics.

    Args:
        model: What is trained; its last linear layer is the head.
        rules: ``PREFIX`` or ``PREFIX:EPOCHS`` each: parameters whose name begins with PREFIX, or all but the head with
            "all-but-head", stay as they are for that many epochs, which need not be whole; without a number, for ever.
        samples_per_epoch: Of the run.

    Raises:
        UsageError: A rule fits no parameter, has no number after its colon, or everything is frozen for ever.
    """

    def __init__(self, model: nn.Module, rules: Sequence[str], samples_per_epoch: int) -> None:
        until: dict[str, float] = {}
        head = _head(model)
        names = [name for name, _ in model.named_parameters()]
        for rule in rules:
            prefix, colon, number = rule.rpartition(":") if ":" in rule else (rule, "", "")
            samples = _epochs(rule, number) * samples_per_epoch if colon else math.inf
            chosen = [name for name in names if _inside(name, prefix, head)]
            if not chosen:
                raise UsageError(
                    f"optim.freeze has {rule!r}, and no parameter of the model begins so",
                    hint=f"parts are {', '.join(_parts(names))}; or {ALL_BUT_HEAD}",
                )
            for name in chosen:
                until[name] = max(until.get(name, 0.0), samples)
        if until and len(until) == len(names) and all(math.isinf(samples) for samples in until.values()):
            raise UsageError("optim.freeze freezes the whole model for ever")
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

    def still(self, samples: int) -> None:
        """Before the forward of the step that starts after `samples` samples, on a model in training mode."""
        for norm, until in self._norms:
            norm.train(samples >= until)

    def drop_gradients(self, samples: int) -> None:
        """After its backward, before the gradient is clipped."""
        for parameter, until in self._thawing:
            if samples < until:
                parameter.grad = None


def _head(model: nn.Module) -> str:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else ""


def _inside(name: str, prefix: str, head: str) -> bool:
    if prefix == ALL_BUT_HEAD:
        return not (head and name.startswith(f"{head}."))
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
    """The first two words of the names, once each, in order."""
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
