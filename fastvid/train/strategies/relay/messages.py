"""Messages between the hub and a stage, sent over a `fastvid.train.strategies.shared.link.Link`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from fastvid.train.strategies.shared.link import Link


class RelayMessage(IntEnum):
    """Kind of message: PLAN, OWN, UNIT and END are sent by the hub; READY, DONE and FAILED by a stage."""

    PLAN = 4
    OWN = 1
    UNIT = 2
    END = 3
    READY = 16
    DONE = 17
    FAILED = 18


@dataclass(frozen=True, slots=True)
class Message:
    """A message with JSON values and a body."""

    kind: RelayMessage
    values: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


def send(link: Link, message: Message) -> None:
    """Send a message; raises as `Link.send` does."""
    values = json.dumps(message.values).encode()
    # bytearray, because torch warns about read-only memory.
    payload = torch.frombuffer(bytearray(values + message.body), dtype=torch.uint8)
    link.send((message.kind, len(values)), payload)


def receive(link: Link) -> Message:
    """Wait for a message; raises as `Link.receive` does."""
    (kind, size, *_), payload = link.receive()
    assert payload is not None
    data = payload.numpy()
    return Message(RelayMessage(kind), json.loads(data[:size].tobytes()), data[size:].tobytes())
