"""Start runs of several ranks, one after the other, by forking one process that has imported torch.

``python -m tests.golden.ranks WORLD RUN...``, where each RUN is a JSON list of arguments of ``fastvid train``.
"""

import contextlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence

import torch._dynamo  # otherwise each rank imports it with its first optimizer, which takes two seconds

from tests.golden.seams import command


@contextlib.contextmanager
def port() -> Iterator[int]:
    """Reserve a port for a server that binds it by number: bound here, without listening."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run(words: Sequence[str], world: int) -> None:
    """Execute one run.

    Raises:
        AssertionError: If a rank fails.
    """
    with port() as kept:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept), "WORLD_SIZE": str(world)}
        ranks = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                os.environ.update(place, RANK=str(rank))
                _rank(words)
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    assert codes == [0] * world, f"ranks of {words} ended with {codes}"


def _rank(words: Sequence[str]) -> None:
    code = 1
    try:
        command("train", *words)
        code = 0
    except BaseException:  # noqa: BLE001 - reported by the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Skip the parent's clean-up.
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    for words in sys.argv[2:]:
        run(json.loads(words), int(sys.argv[1]))


if __name__ == "__main__":
    main()
