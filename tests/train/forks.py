"""Starts the ranks of a test by forking one process that has imported torch already: seconds less for each rank.

``python -m tests.train.forks WORLD MODULE ARGUMENTS...`` runs the module as the main one in each rank, and prints the
ranks' exit codes as JSON; a signal's number is negative.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback

import torch._dynamo  # torch imports it with the first optimizer, for two seconds
import torch.distributed
import torch.nn.parallel  # noqa: F401

import fastvid.train.launch  # noqa: F401


def main() -> None:
    world, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ranks = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _run(rank, module, arguments)
        ranks.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    print(json.dumps(codes))


def _run(rank: int, module: str, arguments: list[str]) -> None:
    os.environ["RANK"] = str(rank)
    os.dup2(2, 1)  # the codes alone are output
    sys.argv = [module, *arguments]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - reported by the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Not the parent's clean-up.
        os._exit(code)


if __name__ == "__main__":
    main()
