"""A user-defined strategy with a server and clients, built on `fastvid.train.strategies.link`.

Rank 0 serves the weights and a counter of batches, in a thread for each client. Every rank, rank 0 too, is a client:
after a step it sends how its weights changed, and gets the number of its next batch and the newest weights.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fastvid.load.batch.batch import Batch
from fastvid.train import Round, Strategy
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.ranks import Member, broadcast_bytes
from fastvid.train.strategies.link import Address, Link, Listener, host_of_job, open_link, token_of_job
from fastvid.train.tasks.task import Sums

FIRST, NEXT, LOOK, LEAVE = "first", "next", "look", "leave"  # what a client asks for
TIMEOUT_S = 60.0


class Central(Strategy):
    """The server sums the weight changes sent by clients; `share` is the fraction of a change that it adds."""

    shares_batches = False

    def __init__(self, member: Member, *, share: float = 1.0) -> None:
        super().__init__(member)
        self.share, self.taken, self.done = share, 0, 0

    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        self.known = parameters_to_vector(replica.model.parameters()).detach()
        address = None
        if self.member.leads:
            self.central, self.lock = self.known.clone(), threading.Lock()
            self.listener = Listener(self.serve, TIMEOUT_S, token=token_of_job(), host=host_of_job())
            self.listener.start()
            address = self.listener.address.encode()
        self.link = open_link(Address.decode(broadcast_bytes(address, self.member) or b""), TIMEOUT_S)
        if self.world_size > 1:
            dist.barrier()  # all are in before rank 0 can be done

    def serve(self, link: Link) -> None:
        kind = FIRST
        while kind != LEAVE:
            asked = link.receive(torch.empty_like(self.central))
            kind = asked.kind
            with self.lock:
                self.central += self.share * asked.payload
                self.done, self.taken = self.done + (kind == NEXT), self.taken + (kind in (FIRST, NEXT))
                values, weights = {"batch": self.taken - 1, "done": self.done}, self.central.clone()
            link.send(kind, values, weights)

    @torch.no_grad()
    def ask(self, kind: str, replica: Replica) -> tuple[int, int]:
        weights = parameters_to_vector(replica.model.parameters())
        self.link.send(kind, payload=weights - self.known)
        answer = self.link.receive(weights)
        self.known = weights
        vector_to_parameters(weights.clone(), replica.model.parameters())
        return answer["batch"], answer["done"]

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        per_epoch = replica.schedule.total // epochs // loader.global_batch_size
        self.next = self.ask(FIRST, replica)
        try:
            for epoch in range(self.next[0] // per_epoch, epochs):
                yield Round(replica, self.batches(replica, loader, epoch, per_epoch), epoch, kept=self.member.leads)
        finally:
            self.ask(LEAVE, replica)
            self.link.close()
            if self.member.leads:
                self.listener.close()
                self.listener.join(TIMEOUT_S)  # until the others have left

    def batches(self, replica: Replica, loader: Loader, epoch: int, per_epoch: int) -> Iterator[Batch]:
        size = loader.global_batch_size
        while self.next[0] // per_epoch == epoch:
            start = self.next[0] % per_epoch * size
            loader.go(epoch, start, start + size)
            replica.samples = self.next[1] * size  # of all ranks: the position in the schedule
            yield from loader

    def maybe_sync(self, replica: Replica, sums: Sums) -> None:
        self.next = self.ask(NEXT, replica)

    def settle(self, replica: Replica) -> bool:
        self.ask(LOOK, replica)  # what rank 0 saves and evaluates is the server's
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = self.done = state["done"]
