"""``sync=asgd`` under the real trainer: ranks of one job, and jobs of their own.

``python -m tests.train.strategies.asgd.jobs FOLDER SCENARIO...`` on every rank, as `tests.train.strategies.lab` does;
or ``python -m tests.train.strategies.asgd.jobs FOLDER job NAME PORT ALL...`` for a job of one process: the server where
NAME is "server", else a client of it. It takes its first step when all that are named are about to.
"""

import sys
import time
from pathlib import Path

import torch

from tests.train import toy
from tests.train.strategies import lab

LEASE_BATCHES = 4
PERIOD = 3
MIDDLE = 7  # the step of the server's job in which it waits for one that joins late
AHEAD = 15  # steps of the first rank that the last one waits for in its second step
STEP_S = 0.02  # so that clients take turns
PAUSE_S = 0.005


def begin_together(folder, name, names):
    """Make a trainer wait before its first step until all named jobs are about to take theirs."""
    own, all_of_them = folder / f"{name}.steps", [folder / f"{other}.steps" for other in names]

    def step(*_):
        if not own.exists():
            own.touch()
            for other in all_of_them:
                wait_for(other)
        time.sleep(STEP_S)

    def setup(made):
        made.replica.model.register_forward_pre_hook(step)

    return setup


def wait_in_the_middle(folder, late):
    """Make a trainer wait in a step until a job that starts later takes its first one."""
    steps = 0

    def step(*_):
        nonlocal steps
        steps += 1
        if steps == MIDDLE:
            (folder / "server.middle").touch()
            wait_for(folder / f"{late}.steps")

    def setup(made):
        made.replica.model.register_forward_pre_hook(step)

    return setup


def stand_still(folder, member):
    """Make the last rank stand in its second step until the first has done `AHEAD`."""
    steps, sign = 0, folder / "ahead"

    def step(*_):
        nonlocal steps
        steps += 1
        if member.leads and steps == AHEAD:
            sign.touch()
        if member.world.rank == member.world.size - 1 and steps == 2:
            wait_for(sign)

    def setup(made):
        begin_together(folder, str(member.world.rank), [str(rank) for rank in range(member.world.size)])(made)
        made.replica.model.register_forward_pre_hook(step)

    return setup


def wait_for(sign):
    while not sign.exists():
        time.sleep(PAUSE_S)


GRADIENTS = {"lease_batches": LEASE_BATCHES}


def plain(folder, member):
    ranks = [str(rank) for rank in range(member.world.size)]
    setup = begin_together(folder, str(member.world.rank), ranks)
    case = lab.Case(sync="asgd", norm=True, options=GRADIENTS, optim={"momentum": 0.5}, setup=setup)
    return lab.run(case, folder, member)


def standing(folder, member):
    case = lab.Case({"lease_batches": PERIOD}, sync="asgd", setup=stand_still(folder, member))
    return lab.run(case, folder, member)


SCENARIOS = {"plain": plain, "standing": standing}


def job(folder, name, port, *names):
    torch.set_num_threads(1)
    place = {"port": int(port)} if name == "server" else {"server": f"127.0.0.1:{port}"}
    setup = wait_in_the_middle(folder, "late") if names == ("late",) else begin_together(folder, name, names)
    case = lab.Case({"lease_batches": PERIOD, **place}, sync="asgd", setup=setup, run={"checkpoint_every_s": 0.0})
    torch.save(lab.run(case, folder / name, toy.ALONE), folder / f"{name}.pt")


if __name__ == "__main__":
    if sys.argv[2] == "job":
        job(Path(sys.argv[1]), *sys.argv[3:])
    else:
        lab.main(SCENARIOS)
