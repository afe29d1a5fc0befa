"""Runs with the tutorial's asynchronous strategy, a file outside the package: ``python -m ... FOLDER SCENARIO...``."""

import functools
import time
from dataclasses import replace
from pathlib import Path

from tests.train import toy
from tests.train.strategies import lab

SYNC = "gossip:Gossip"
CASE = lab.Case({"mix": 0.1}, sync=SYNC)
AHEAD, BEHIND = 20, 3  # steps of the first rank that the second one waits for in this step of its own
STOPPED_AFTER = 6


def at_its_own_pace(made):
    """Have the second rank wait in a step until the first one has done many."""
    steps, sign = 0, Path(made.config.run.out) / "ahead"

    def hook(*_):
        nonlocal steps
        steps += made.replica.model.training
        if made.member.leads and steps == AHEAD:
            sign.touch()
        while not made.member.leads and steps == BEHIND and not sign.exists():
            time.sleep(0.01)

    made.replica.model.register_forward_pre_hook(hook)


def stopped(case, folder, member):
    """Stop after some steps, on all ranks, then resume."""
    first = lab.run(case, folder, member, toy.StopAfter(STOPPED_AFTER))
    return {"first": first, **lab.run(case, folder, member)}


SCENARIOS = {
    "whole": functools.partial(lab.run, replace(CASE, setup=at_its_own_pace)),
    "stopped": functools.partial(stopped, CASE),
}

if __name__ == "__main__":
    lab.main(SCENARIOS)
