"""A strategy of one's own that never waits: ranks take batches from a common counter and mix their weights.

torchrun --nproc-per-node 2 -m fastvid.train RECIPE sync=examples.gossip:Gossip       in a checkout

After each step a rank moves towards the newest weights of the others; ``sync_options.mix`` is their part. Rank 0 saves
and evaluates its own model. A run that was stopped resumes after as many batches as were done; the few that were in
flight then may be trained on twice, or not at all.
"""

import time

from torch import frombuffer, nn

from fastvid.train import Round, Strategy
from fastvid.train.strategies.link import shared_store


class Gossip(Strategy):
    shares_batches = False

    def __init__(self, member, *, mix=0.5):
        super().__init__(member)
        self.mix, self.before = mix, 0
        self.store = shared_store(member)  # numbers and bytes by name; rank 0 serves it

    def rounds(self, replica, loader, epochs):
        per_epoch = replica.schedule.total // epochs // loader.global_batch_size
        self.batch = self.before + self.store.add("taken", 1) - 1
        try:
            for epoch in range(self.batch // per_epoch, epochs):
                yield Round(replica, self.batches(replica, loader, epoch, per_epoch), epoch, kept=self.member.leads)
        finally:
            self.store.add("left", 1)
            while self.member.leads and self.store.add("left", 0) < self.world_size:
                time.sleep(0.01)  # the others still need the store

    def batches(self, replica, loader, epoch, per_epoch):
        size = loader.global_batch_size
        while self.batch // per_epoch == epoch:
            start = self.batch % per_epoch * size
            loader.go(epoch, start, start + size)
            replica.samples = self.state_dict()["done"] * size  # of all ranks: the position in the schedule
            yield from loader
            self.batch = self.before + self.store.add("taken", 1) - 1

    def maybe_sync(self, replica, sums):
        weights = nn.utils.parameters_to_vector(replica.model.parameters()).detach().cpu()
        for key in (f"weights/{rank}" for rank in range(self.world_size) if rank != self.member.world.rank):
            if self.store.check([key]):
                weights.lerp_(frombuffer(bytearray(self.store.get(key)), dtype=weights.dtype), self.mix)
        nn.utils.vector_to_parameters(weights.to(self.member.device), replica.model.parameters())
        self.store.set(f"weights/{self.member.world.rank}", weights.numpy().tobytes())
        self.store.add("done", 1)

    def state_dict(self):
        return {"done": self.before + self.store.add("done", 0)}

    def load_state_dict(self, state):
        self.before = state["done"]
