"""Fragments of a model that are averaged at different steps of a round, and adopted some steps later.

As in Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): with F fragments, a message has 1 / F of the bytes,
and the ranks send one every K / F steps; with a delay, it travels while they train on. Fragments are consecutive whole
parameters, so that no tensor is copied in parts, of about equal bytes: none exceeds a fair share by more than one
parameter. Norm statistics and the words of the ranks travel with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastvid.train.strategies.kavg.outer import OuterMomentum
from fastvid.train.strategies.shared.average import CODECS, Averager, Averaging
from fastvid.train.strategies.shared.wire import Traffic


class Fragment:
    """A part of the model with its anchor, outer momentum and compression.

    `anchor`: [n]; None if not needed.
    """

    def __init__(
        self, parameters: Sequence[Tensor], outer: OuterMomentum, compress: str, traffic: Traffic, *, anchored: bool
    ) -> None:
        self._parameters, self.outer, self._traffic = list(parameters), outer, traffic
        self._codec = None if compress == "none" else CODECS[compress]()
        self.averager = Averager(self._parameters, [], codec=self._codec, traffic=traffic)
        self.averager.flat.collect()
        self.anchor = self.averager.parameters.clone() if anchored else None
        self.due: int | None = None
        self._sent = 0
        self._averaging: Averaging | None = None

    def collect(self, others: Sequence[Tensor], words: Tensor | None) -> Averager:
        """Copy this rank's values into the buffer, and return it.

        `words`: [w], further values; None for none.
        """
        count = 0 if words is None else len(words)
        flat = self.averager.flat
        if not flat.consists_of([*self._parameters, *others]) or len(flat.words) != count:
            self.averager = Averager(self._parameters, others, words=count, codec=self._codec, traffic=self._traffic)
            flat = self.averager.flat
        flat.collect()
        if words is not None:
            flat.words.copy_(words)
        return self.averager

    def send(self, size: int, now: int, delay: int, *, whole: bool) -> None:
        """Start to average the buffer over all ranks, to be adopted `delay` steps after step `now`."""
        self._averaging = self.averager.start(size, None, "average", self.anchor, whole=whole)
        self._sent, self.due = now, now + delay

    def advance(self, now: int) -> None:
        """Start the second of two messages half-way."""
        if self._averaging is not None and self.due is not None and 2 * now >= self._sent + self.due:
            self._averaging.advance()

    def receive(self) -> Tensor:
        """Wait for the mean; the buffer contains it afterwards. Return its part of the parameters, [n]."""
        assert self._averaging is not None
        self._averaging.finish()
        self._averaging = self.due = None
        return self.averager.parameters

    @torch.no_grad()
    def restart(self) -> None:
        """Take the part as it is now for the anchor."""
        self.averager.flat.collect()
        if self.anchor is not None:
            self.anchor.copy_(self.averager.parameters)

    @torch.no_grad()
    def release(self, size: int) -> None:
        """Add what compression withheld on any rank to the part, which all ranks have alike."""
        if self._codec is None or self.anchor is None or size == 1:
            return
        rest = Averager([torch.zeros_like(self.anchor)], [], traffic=self._traffic)
        if not self._codec.drain(rest.flat.buffer):
            return
        rest.reduce(size, None, "settle")
        self.anchor.add_(rest.parameters)
        averager = self.collect([], None)
        averager.parameters.copy_(self.anchor)
        averager.flat.spread()


def split(parameters: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Divide parameters into `count` consecutive parts of about equal numbers of elements; parts may be empty."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    total = sum(parameter.numel() for parameter in parameters)
    done = 0
    for parameter in parameters:
        # The part in which the middle of the parameter lies.
        middle = done + parameter.numel() / 2
        parts[min(count - 1, int(middle * count / max(1, total)))].append(parameter)
        done += parameter.numel()
    return parts
