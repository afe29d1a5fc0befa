"""A stage: keeps partitions and trains the models that visit it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fastvid.runtime import faults
from fastvid.train.strategies.relay.messages import Message, RelayMessage, receive, send
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.strategies.shared.link import Address, open_link


class StageWorker(Protocol):
    """Loads partitions and trains models for a stage; `serve` does the communication."""

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        """Keep exactly these partitions from now on, and load the new ones.

        Returns JSON values for the results.
        """
        ...

    def visit(self, unit: Unit, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """Train a unit.

        Returns the new token, and JSON values about the visit, including ``score`` if the unit ends an epoch.
        If the model cannot be trained further, for example because its loss is not finite: an empty token, and
        ``reason``. An exception, for example about the data, is an error of the stage and stops it.
        """
        ...


def serve(hub: Address, begin: Callable[[Mapping[str, Any]], StageWorker], timeout_s: float) -> None:
    """Train the units assigned by the hub until the sweep is finished.

    `timeout_s`: seconds of silence after which the hub is considered dead.
    """
    link = open_link(hub, timeout_s)
    plan = receive(link).values
    with link.beating():
        worker = begin(plan)
    while (message := receive(link)).kind is not RelayMessage.END:
        began = time.perf_counter()
        with link.beating():
            if message.kind is RelayMessage.OWN:
                answer = Message(RelayMessage.READY, worker.assign(tuple(message.values["partitions"])))
            else:
                unit = Unit(**message.values)
                faults.reach("visit")
                token, report = worker.visit(unit, message.body or None)
                report["seconds"] = time.perf_counter() - began
                answer = Message(RelayMessage.FAILED if "reason" in report else RelayMessage.DONE, report, token)
        faults.reach("visited")
        send(link, answer)
    link.close()
