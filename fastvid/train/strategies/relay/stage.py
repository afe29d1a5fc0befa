"""A stage: keeps partitions, and trains the models that visit it."""

from __future__ import annotations

import time
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from fastvid.runtime import faults
from fastvid.train.strategies.relay.messages import Kind, Message, receive, send
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.strategies.shared.link import open_link


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
            The new token, and JSON values about the visit; ``score`` among them where the unit ends an epoch. Where the
            model cannot be trained on, as when its loss is not finite, no token, and ``reason``. An error is the
            stage's own, as one of its data, and ends it.
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
    link = open_link(store, timeout_s)
    while (message := receive(link)).kind is not Kind.END:
        began = time.perf_counter()
        with link.beating():
            if message.kind is Kind.OWN:
                answer = Message(Kind.READY, workshop.own(tuple(message.values["partitions"])))
            else:
                unit = Unit(**message.values)
                faults.reach("visit")
                token, report = workshop.visit(unit, message.body or None)
                report["seconds"] = time.perf_counter() - began
                answer = Message(Kind.FAILED if "reason" in report else Kind.DONE, report, token)
        faults.reach("visited")
        send(link, answer)
