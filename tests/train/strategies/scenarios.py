"""The scenarios that the processes of `tests/train/strategies` run, by name.

Started as ``python -m tests.train.strategies.scenarios FOLDER SCENARIO...`` on every rank; each scenario leaves
FOLDER/SCENARIO-RANK.pt.
"""

import os
from dataclasses import replace

import torch

from fastvid.runtime import faults
from fastvid.train.strategies.average import BITS, BLOCK, Integers
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.lab import CONSTANT, PLAIN, Case

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
ADAM = {"name": "adam", "base_lr": 0.01}
SHORT = {"epochs": 2, "eval_every_epochs": 2}
QUIET = {"log_every_steps": 10**6, "eval_every_epochs": 10**6}
OFTEN = {"checkpoint_every_s": 0.0}
STOPPED_AFTER, KILLED_AFTER = 12, 16  # in the second epoch, whatever the batch
STILL = PLAIN | {"base_lr": 1e-9}  # hardly moves, so that the gradient stays what it is
HALVING = {"decay": "step", "milestones": (1.0, 2.5), "gamma": 0.5, "warmup_epochs": 0.5}

CASES = {
    # References: one process, or ddp on several.
    "ddp-sgd": Case(sync="ddp", optim=PLAIN, run=SHORT),
    "ddp-momentum": Case(sync="ddp", optim=MOMENTUM, run=SHORT),
    "ddp-adam": Case(sync="ddp", optim=ADAM, run=SHORT),
    "ddp-noise": Case(sync="ddp", optim=MOMENTUM | CONSTANT, noise=1.0),
    "ddp-masked": Case(sync="ddp", optim=MOMENTUM, run=SHORT, data={"last": "mask", "bad": (3, 40, 41)}),
    "ddp-plain": Case(sync="ddp", optim=MOMENTUM),
    # K = 1.
    "k1-sgd": Case({"period": 1}, optim=PLAIN, run=SHORT),
    "k1-momentum": Case({"period": 1}, optim=MOMENTUM, run=SHORT),
    "k1-adam": Case({"period": 1}, optim=ADAM, run=SHORT),
    "k1-masked": Case({"period": 1}, optim=MOMENTUM, run=SHORT, data={"last": "mask", "bad": (3, 40, 41)}),
    # Quadratic objective.
    "noise-k3": Case({"period": 3}, optim=MOMENTUM | CONSTANT, noise=1.0),
    "noise-k7": Case({"period": 7}, optim=MOMENTUM | CONSTANT, noise=1.0),
    "noise-k11": Case({"period": 11}, optim=MOMENTUM | CONSTANT, noise=1.0),
    "still-k11": Case({"period": 11}, optim=PLAIN | CONSTANT, noise=0.0),
    # Communication.
    "count-k11": Case({"period": 11}, optim=PLAIN, run=QUIET),
    "count-k5": Case({"period": 5}, optim=MOMENTUM, run=QUIET),
    # Options on the toy net.
    "k4": Case({"period": 4}, optim=MOMENTUM),
    "k4-norm": Case({"period": 4}, optim=MOMENTUM, norm=True),
    # Integers.
    "count-int8": Case({"period": 11, "compress": "int8"}, optim=PLAIN, run=QUIET),
    "count-int4": Case({"period": 11, "compress": "int4"}, optim=PLAIN, run=QUIET),
    "k4-nesterov": Case({"period": 4, "outer": "nesterov"}, optim=MOMENTUM | CONSTANT),
    "k4-int8": Case({"period": 4, "outer": "nesterov", "compress": "int8"}, optim=MOMENTUM | CONSTANT, norm=True),
    "k4-int4": Case({"period": 4, "compress": "int4"}, optim=MOMENTUM),
    "post-local": Case({"period": 4, "local_after": 2.0}, optim=MOMENTUM),
    # Growing batches.
    "batch-ddp": Case({"batch": "schedule"}, sync="ddp", optim=MOMENTUM | HALVING),
    "batch-kavg": Case({"batch": "schedule", "period": 3}, optim=MOMENTUM | HALVING),
    "meter-ddp": Case({"batch": "noise", "batch_window": 10**6}, sync="ddp", optim=STILL, noise=1.0),
    "meter-k1": Case({"batch": "noise", "batch_window": 10**6, "period": 1}, optim=STILL, noise=1.0),
    "meter-k5": Case({"batch": "noise", "batch_window": 10**6, "period": 5}, optim=STILL, noise=1.0),
}

STATEFUL = {
    "k4": CASES["k4"],
    "norm": CASES["k4-norm"],
    "batch": CASES["batch-kavg"],
    "int8": CASES["k4-int8"],
    "int4": CASES["k4-int4"],
    "noise": Case(
        {"batch": "noise", "batch_window": 7, "batch_threshold": 0.05, "batch_max": 32, "period": 2}, optim=MOMENTUM
    ),
}


ROUNDS, LENGTH = 100, 3 * BLOCK + 17


def wire(folder, member):
    """Average random vectors as integers."""
    found = {}
    for name, bits in BITS.items():
        codec = Integers(bits)
        generator = torch.Generator().manual_seed(member.world.rank)
        means, given, received = [], torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
        for _ in range(ROUNDS):
            values = torch.rand(LENGTH, generator=generator, dtype=torch.float64)
            given += values
            codec.average(values)
            received += values
            means.append(values[:: LENGTH // 20])
        withheld = torch.zeros(LENGTH, dtype=torch.float64)
        assert codec.drain(withheld)
        assert not torch.equal(withheld, torch.zeros(LENGTH))
        again = torch.zeros(LENGTH, dtype=torch.float64)
        codec.drain(again)
        assert not again.any()
        found[name] = {
            "means": means, "given": given, "received": received, "withheld": withheld,
            "step": 1 / (2 ** (bits - 1) - 1),
        }  # fmt: skip
    return found


def once(case):
    """Train without interruption."""
    return lambda folder, member: lab.run(case, folder, member)


def whole(case):
    """Train without interruption, with a checkpoint after each average."""
    return once(replace(case, run={**case.run, **OFTEN}))


def again(case):
    """Stop in the middle of an epoch, and resume from the checkpoint."""

    def both(folder, member):
        often = replace(case, run={**case.run, **OFTEN})
        # Only the last rank receives the signal.
        stop = toy.StopAfter(STOPPED_AFTER) if member.world.rank == member.world.size - 1 else None
        stopped = lab.run(often, folder, member, stop)
        assert not stopped["over"]
        return {**lab.run(often, folder, member), "stopped_at": stopped["samples"]}

    return both


def killed(case):
    """Kill the second rank after some steps."""

    def run(folder, member):
        if member.world.rank == 1:
            os.environ[faults.VARIABLE] = f"step:{KILLED_AFTER}"
        return lab.run(replace(case, run={**case.run, **OFTEN}), folder, member)

    return run


SCENARIOS = {
    **{name: once(case) for name, case in CASES.items()},
    **{f"whole-{name}": whole(case) for name, case in STATEFUL.items()},
    **{f"again-{name}": again(case) for name, case in STATEFUL.items()},
    "killed": killed(CASES["batch-kavg"]),
    "resumed": whole(CASES["batch-kavg"]),
    "wire": wire,
}

if __name__ == "__main__":
    lab.main(SCENARIOS)
