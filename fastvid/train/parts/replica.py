"""A model in training with its optimizer, schedule and averaged weights; the loader and the record of its samples.

The exponential moving average (EMA) of the weights, if enabled, is used for evaluation. Parts of a model may be frozen,
for the whole run or for the first epochs (transfer learning). Parameters frozen for the whole run have
requires_grad=False, so their backward is not computed. For parameters that are unfrozen later, the gradient is computed
and discarded before the step, because DistributedDataParallel fixes its set of gradients on construction.

`Loader` is the loader of the trainer, and `Lineage` a record of the samples that it trained on.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fastvid.errors import StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.labels import IGNORED_LABEL
from fastvid.load.device import upload
from fastvid.load.loader import ClipLoader
from fastvid.load.order.epoch import Batches
from fastvid.train.parts.optim import Schedule, heads, load_optimizer


class Average(AveragedModel):
    """The exponential moving average (EMA) of a model's parameters and buffers, in `module`.

    The average is linear, so running statistics may be averaged over the ranks before or after it, with the same
    result.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=self._blend, use_buffers=True)
        self.decay, self._updates = decay, 1.0
        self.requires_grad_(False)
        self.restart(model)

    def restart(self, model: nn.Module) -> None:
        """Reset the average to the model's current values, for example after weights were loaded."""
        self.n_averaged.zero_()
        self.update_parameters(model)

    def update(self, model: nn.Module, updates: float = 1.0) -> None:
        """Update the average as by `updates` consecutive updates with the model's current values."""
        self._updates = updates
        self.update_parameters(model)

    def _blend(self, averaged: Any, current: Any, count: Any) -> None:
        blend: Any = get_ema_multi_avg_fn  # torch does not annotate it
        blend(self.decay**self._updates)(averaged, current, count)

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Swap the averaged values into the model inside the block.

        `module` cannot be evaluated instead, because the copy lacks the ``forward`` of a compiled model.
        """
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        averaged = itertools.chain(self.module.parameters(), self.module.buffers())
        for own, value in zip(itertools.chain(model.parameters(), model.buffers()), averaged, strict=True):
            kept = own.detach().clone()
            own.copy_(value)
            value.copy_(kept)


ALL_BUT_HEAD = "all-but-head"


class Freezer:
    """Freezes parts of a model.

    Frozen batch norms use their running statistics and do not update them.

    `rules`: ``PREFIX`` freezes the parameters whose dotted names start with it, ``PREFIX:EPOCHS`` only for the first
    epochs; "all-but-head" stands for all but the last layer.
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
        # A batch norm is frozen for as long as its weight parameter.
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


@dataclass(eq=False)
class Replica:
    """A model with its optimizer and its position in the learning rate schedule.

    `schedule`: learning rate as a function of the samples seen. `samples`: samples seen so far. `ema_clips`: number of
    clips after which the average decays by `ema_decay`.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    _: KW_ONLY
    scale_loss: InitVar[bool] = False
    ema_decay: InitVar[float | None] = None
    ema_clips: int = 1
    freezer: Freezer | None = None

    def __post_init__(self, scale_loss: bool, ema_decay: float | None) -> None:
        self.forward: nn.Module = self.model
        self.samples = 0
        self.lr = self.schedule.lr(0)
        self.lr_scale = 1.0
        self.scaler = torch.amp.GradScaler("cuda", enabled=scale_loss)
        self.average = None if ema_decay is None else Average(self.model, ema_decay)
        self._pending = 0
        # A buffer may be infinite on purpose, such as an attention mask.
        self._infinite = {name for name, value in self.model.named_buffers() if not _is_finite(value)}

    def set_lr(self) -> None:
        """Set the learning rate of every group for the next step."""
        self.lr = self.schedule.lr(self.samples) * self.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group.get("lr_mult", 1.0)

    def stepped(self, clips: int) -> None:
        """Count the clips of a step, over all ranks, for the next `update_average`."""
        self._pending += clips

    def update_average(self) -> None:
        """Update the average of the weights, if there is one; call it when all ranks have the same weights.

        It decays in proportion to the clips since the last call, so the decay per sample is the same whether it is
        updated after each step or, with local steps, after each round.
        """
        if self.average is not None and self._pending:
            self.average.update(self.model, self._pending / self.ema_clips)
        self._pending = 0

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if there is an average."""
        return contextlib.nullcontext() if self.average is None else self.average.in_place(self.model)

    def nonfinite(self) -> list[str]:
        """Return the names of weights, running statistics, averages and moments with a NaN or infinite value.

        Buffers that had such a value before training are left out.
        """
        return [name for name, value in self._values() if not _is_finite(value)]

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        models = [("", self.model)] + ([] if self.average is None else [("average of ", self.average.module)])
        for prefix, model in models:
            for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
                if name not in self._infinite:
                    yield f"{prefix}{name}", value
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{key} of {names.get(parameter, 'a parameter')}", value

    def state_dict(self) -> dict[str, Any]:
        """Return weights, their average, optimizer state, loss scale and schedule position."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "samples": self.samples,
            "average": None if self.average is None else self.average.module.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        try:
            self.model.load_state_dict(state["model"])
            load_optimizer(self.optimizer, state["optimizer"], self.schedule.optim)
            if self.average is not None and state.get("average") is not None:
                self.average.module.load_state_dict(state["average"])
            elif self.average is not None:
                self.average.restart(self.model)
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateError(
                f"checkpoint does not fit the model: {error}",
                hint="use the model and optim.groups that wrote it, or another run.out",
            ) from error
        self.scaler.load_state_dict(dict(state["scaler"]))
        self.samples = int(state["samples"])


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


LABEL: Final = "label"
"""Column of the annotations from which a `fastvid.ClipLoader` reads labels by default."""


class Loader:
    """Loads the batches of one rank: a `fastvid.ClipLoader`, whose labels may come from another column."""

    def __init__(self, clips: ClipLoader, column: str = LABEL) -> None:
        self.clips, self.column = clips, column
        self._batches: Batches | None = None  # of an epoch, once `go` has chosen a part of it

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0; between epochs, the next one."""
        return int(self.clips.state_dict()["epoch"])

    @property
    def global_batch_size(self) -> int:
        """Samples per global batch."""
        return self.clips.global_batch_size

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.clips.batches.num_samples

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch, then move to the next one."""
        epoch, state = self.clips.epoch, self.clips.state_dict()
        if state["epoch"] != epoch:
            # The checkpoint was saved after the epoch's last batch: yield nothing, and the epoch is still evaluated.
            self.clips.load_state_dict(state | {"epoch": epoch, "position": 0})
            return
        if self.column == LABEL:
            yield from self.clips
            return
        for batch in self.clips:
            values = batch.fields[self.column]
            label = torch.tensor([IGNORED_LABEL if value is None else int(value) for value in values])
            yield Batch(batch, label=upload(label, batch.video.device).where(batch.valid, IGNORED_LABEL))

    @property
    def steps_left(self) -> int:
        """Number of batches left in the current iteration; before an iteration, in the next one."""
        return self.clips.steps_left if self.epoch == self.clips.epoch else 0

    def set_batch_size(self, global_batch_size: int) -> None:
        """Change the batch size from the current position on; ends a running iteration."""
        self.clips.set_batch_size(global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the last delivered batch."""
        return self.clips.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of a state."""
        self.clips.load_state_dict(state)

    def go(self, epoch: int, start: int, stop: int) -> None:
        """Move to positions [start, stop) of an epoch: the next iteration delivers exactly these."""
        self.clips.load_state_dict(self.clips.state_dict() | {"epoch": epoch, "position": start})
        batches = self._batches = self._batches or self.clips.batches
        last, size, unit = batches.last, batches.size, batches.unit
        # A run with another batch size may have left a range that no batches fill.
        if last == "drop" and batches.group == 1:
            last = "keep"
        elif last == "drop":
            size = next((one for one in range(size, 0, -unit) if (stop - start) % one == 0), size)
        self.clips.batches = replace(batches, num_samples=stop, last=last, size=size)  # do not prefetch beyond `stop`

    def close(self) -> None:
        """Stop the loader's threads and processes."""
        self.clips.close()


_MASK: Final = 2**64 - 1


def hash64(text: str) -> int:
    """Return a hash of a text, 0 to 2**64 - 1, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Lineage:
    """The samples that a model was trained on: per epoch, their number and a digest.

    The digest is the sum modulo 2**64 of a 64-bit hash of each sample's position and key, so it can be summed in any
    order over steps and ranks. Two runs with the same digest trained on the same samples at the same positions.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[int, int]] = {}

    @staticmethod
    def of(batch: Batch) -> tuple[int, int]:
        """Return the number of samples of a batch and their digest as a signed 64-bit integer."""
        count = digest = 0
        for position, key in zip(batch.position.tolist(), batch.key, strict=True):
            if position >= 0:
                count += 1
                digest += hash64(f"{position}:{key}")
        return count, _signed(digest)

    def add(self, epoch: int, count: int, digest: int) -> None:
        """Add samples of an epoch."""
        samples, before = self.epochs.get(epoch, (0, 0))
        self.epochs[epoch] = samples + count, (before + digest) & _MASK

    def rows(self) -> list[tuple[int, int]]:
        """Return samples and digest of each epoch, ascending; digests as signed 64-bit integers."""
        return [(samples, _signed(digest)) for _, (samples, digest) in sorted(self.epochs.items())]

    def state_dict(self) -> list[dict[str, int | str]]:
        """Return one entry per epoch, with the digest in hexadecimal."""
        return [
            {"epoch": epoch, "samples": samples, "digest": f"{digest:016x}"}
            for epoch, (samples, digest) in sorted(self.epochs.items())
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a state."""
        self.epochs = {int(entry["epoch"]): (int(entry["samples"]), int(entry["digest"], 16)) for entry in state}


def _signed(word: int) -> int:
    """Return a word's low 64 bits as a two's complement integer, as int64 tensors require."""
    word &= _MASK
    return word - 2**64 if word >= 2**63 else word
