"""A rank of a job whose last rank ends early: ``python -m tests.train.ranks.dying FOLDER kill|raise|stop``.

The other ranks leave the error in FOLDER/RANK.txt.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fastvid.errors import FastvidError
from fastvid.train.ranks import join


def main():
    folder, how = Path(sys.argv[1]), sys.argv[2]
    try:
        with join(8.0) as member:
            dist.all_reduce(torch.ones(3))
            if member.world.rank == member.world.size - 1:
                end(how)
            dist.all_reduce(torch.ones(3))
    except FastvidError as error:
        (folder / f"{os.environ['RANK']}.txt").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)


def end(how):
    if how == "raise":
        raise LookupError("the shelf is empty")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    main()
