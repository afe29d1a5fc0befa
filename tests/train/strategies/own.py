"""Runs with user-defined asynchronous strategies: ``python -m ... FOLDER SCENARIO...``.

One is the tutorial's, a file outside the package; the other has a server and clients.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastvid.train.loop.loop import Trainer
from fastvid.train.ranks import Member
from tests.train import toy
from tests.train.strategies import central, lab

SYNC = "gossip:Gossip"
KINDS = {"gossip": lab.Case({"mix": 0.1}, sync=SYNC), "central": lab.Case(sync=f"{central.__name__}:Central")}
AHEAD, BEHIND = 20, 3  # steps of the first rank that the second one waits for in this step of its own
STOPPED_AFTER = 6


def at_its_own_pace(made: Trainer) -> None:
    """Have the second rank wait in a step until the first one has done many."""
    steps, sign = 0, Path(made.config.run.out) / "ahead"

    def hook(*_: Any) -> None:
        nonlocal steps
        steps += made.replica.model.training
        if made.member.leads and steps == AHEAD:
            sign.touch()
        while not made.member.leads and steps == BEHIND and not sign.exists():
            time.sleep(0.01)

    made.replica.model.register_forward_pre_hook(hook)


def stopped(case: lab.Case, folder: Path, member: Member) -> dict[str, Any]:
    """Stop after some steps, on all ranks, then resume."""
    first = lab.run(case, folder, member, toy.StopAfter(STOPPED_AFTER))
    return {"first": first, **lab.run(case, folder, member)}


WHOLE = {
    f"{name}-whole": functools.partial(lab.run, replace(case, setup=at_its_own_pace)) for name, case in KINDS.items()
}
STOPPED = {f"{name}-stopped": functools.partial(stopped, case) for name, case in KINDS.items()}

if __name__ == "__main__":
    lab.main(WHOLE | STOPPED)
