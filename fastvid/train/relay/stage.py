"""A stage: keeps partitions, and trains the models that visit it."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from fastvid import faults
from fastvid.errors import FastvidError, UsageError
from fastvid.train.relay.link import Link, Message, take_seat
from fastvid.train.relay.scheduler import Unit

log = logging.getLogger(__name__)


class Workshop(Protocol):
    """What a stage does with a model and data; the traffic around it is the same for all."""

    def own(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        """Keeps these partitions from now on, and loads those that are new.

        Returns:
            JSON values about it, for the results.
        """
        ...

    def visit(self, unit: Unit, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """Trains a unit.

        Args:
            unit: One of the partitions that are kept.
            token: The model as the last visit left it; None for a fresh one.

        Returns:
            The new token, and JSON values about the visit; ``score`` among them where the unit ends an epoch.

        Raises:
            FastvidError: The model cannot be trained on, as when its loss is not finite.
        """
        ...


def serve(store: Store, workshop: Workshop, timeout_s: float) -> None:
    """Works for the hub until it says that the sweep is over.

    Args:
        store: Where the hub is met.
        workshop: What is done.
        timeout_s: Silence of the hub that means its death.

    Raises:
        WorkerError: The hub is dead.
    """
    link = Link(store, take_seat(store), 1, timeout_s)
    while (message := link.receive()).kind != "end":
        began = time.perf_counter()
        answer = None
        with link.beating():
            if message.kind == "own":
                answer = Message("ready", workshop.own(tuple(message.values["partitions"])))
            else:
                unit = Unit(**message.values)
                faults.reach("visit")
                try:
                    token, report = workshop.visit(unit, message.body or None)
                    answer = Message("done", {**report, "seconds": time.perf_counter() - began}, token)
                except UsageError:
                    # A recipe that is wrong is no model that fails: the stage ends, and says why.
                    raise
                except FastvidError as error:
                    log.warning("model %d fails: %s", unit.model, error)
                    answer = Message("failed", {"reason": str(error)})
        faults.reach("visited")
        link.send(answer)
