"""One visit: unpack a model from its token, train it on a partition, pack it into a new token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch

from fastvid.errors import StateError
from fastvid.load.batch.batch import Batch
from fastvid.runtime.processes import World
from fastvid.train.config.config import Config
from fastvid.train.loop.loop import Stepper
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.evaluate import Score
from fastvid.train.parts.replica import Lineage, Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.relay import packed_state as tokens
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.tasks.task import LOSS


@dataclass(frozen=True)
class SweepModel:
    """One model of a sweep, with the functions that a stage needs to train it."""

    config: Config
    replica: Callable[[], Replica]
    batches: Callable[[Unit], AbstractContextManager[Iterable[Batch]]]
    evaluate: Callable[[Replica], Score] | None = None


_MODEL: Final = "model"


def train_visit(
    sweep_model: SweepModel, unit: Unit, token: bytes | None, device: torch.device
) -> tuple[bytes, dict[str, Any]]:
    """Train a unit. A pure function of its arguments, so any stage can repeat a lost unit.

    Returns the new token; and JSON values: ``samples`` (of this visit), the mean ``loss`` and the task's metrics,
    ``lr``, ``lineage`` (number and digest of the samples), and if the unit ends an epoch, ``score`` (higher is
    better) and ``eval``. If the loss is not finite: an empty token, and the ``reason``.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        replica, state = _open(sweep_model, unit, token)
        member = Member(World(), device)
        stepper = Stepper.of(sweep_model.config, member, Strategy(member))
        sums, task = None, sweep_model.config.task
        before, lineage = replica.samples, Lineage()
        with sweep_model.batches(unit) as batches:
            for batch in batches:
                found, _ = stepper.step(replica, batch)
                sums = found if sums is None else sums + found
                replica.samples += batch.stop - batch.start
                lineage.add(unit.epoch, *Lineage.of(batch))
        numbers = {LOSS: 0.0} if sums is None else task.row(sums.numbers())
        mean_loss = numbers[LOSS]
        if not math.isfinite(mean_loss):
            return b"", {"reason": f"loss is {mean_loss} after {replica.samples} samples"}
        report: dict[str, Any] = {
            "samples": replica.samples - before,
            **numbers,
            "lr": replica.lr,
            "lineage": lineage.state_dict(),
        }
        state["visits"].append(unit.partition)
        if unit.ends_epoch:
            score = None if sweep_model.evaluate is None else sweep_model.evaluate(replica)
            report["eval"] = None if score is None else score.as_row()
            report["score"] = -mean_loss if score is None else score.value
            state["scores"].append(report["score"])
        data = tokens.pack({**state, "replica": replica.state_dict(), "rng": torch.get_rng_state()})
    return data, report


def read_weights(token: bytes) -> dict[str, torch.Tensor]:
    """Return the model's state dict from a token."""
    return dict(tokens.unpack(token)["replica"]["model"])


def _open(sweep_model: SweepModel, unit: Unit, token: bytes | None) -> tuple[Replica, dict[str, Any]]:
    replica = sweep_model.replica()
    if token is None:
        torch.manual_seed(sweep_model.config.run.seed)
        if replica.average is not None:
            replica.average.restart(replica.model)
        return replica, {_MODEL: unit.model, "visits": [], "scores": []}
    state = tokens.unpack(token)
    if state[_MODEL] != unit.model or len(state["scores"]) != unit.epoch:
        raise StateError(
            f"token contains model {state[_MODEL]} after {len(state['scores'])} epochs, "
            f"but the unit is model {unit.model} in epoch {unit.epoch}"
        )
    replica.load_state_dict(state.pop("replica"))
    torch.set_rng_state(state.pop("rng"))
    return replica, state
