"""Runs with an average of the weights: ``python -m tests.train.plugins.averages FOLDER SCENARIO...`` on every rank."""

from functools import partial

from fastvid.train.parts.replica import Average
from tests.train import toy
from tests.train.strategies import lab

DECAY, PERIOD = 0.8, 4
KINDS = {
    "ddp": {"sync": "ddp"},
    "kavg": {"sync": "kavg", "options": {"period": PERIOD}, "optim": {"momentum": 0.0}},
    # Checkpoints whenever they are possible must not change the average.
    "saving": {
        "sync": "kavg", "options": {"period": PERIOD}, "optim": {"momentum": 0.0}, "run": {"checkpoint_every_s": 0.0},
    },
}  # fmt: skip


def with_average(made):
    replica = made.replica
    replica.average, replica.ema_clips = Average(replica.model, DECAY), toy.BATCH


def run(name, folder, member):
    kept = []
    settled = {}  # the common model by its samples

    def setup(made):
        with_average(made)
        kept.append(made)
        inner = made.strategy.settle

        def settle(replica):
            done = inner(replica)
            settled[replica.samples // toy.BATCH] = lab.flat(replica.model.parameters())
            return done

        made.strategy.settle = settle

    result = lab.run(lab.Case(**KINDS[name], setup=setup), folder, member)
    average = kept[0].replica.average
    assert average is not None
    return result | {
        "average": lab.flat(average.module.parameters()),
        "start": lab.flat(toy.net().parameters()),
        "settled": settled,
    }


if __name__ == "__main__":
    lab.main({name: partial(run, name) for name in KINDS})
