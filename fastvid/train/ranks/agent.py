"""Ends a rank whose torchrun agent has died, so that it does not train beside the ranks of a restarted job."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Final

import torch.distributed as dist

log = logging.getLogger(__name__)

_POLL_S: Final = 0.5

# Time to write a checkpoint after SIGTERM; torchrun, too, kills its workers after 30 s (torch 2.13,
# distributed/elastic/multiprocessing/api.py, PContext.close).
_GRACE_S: Final = 30.0


@contextlib.contextmanager
def ending_with_agent(grace_s: float = _GRACE_S) -> Iterator[None]:
    """End this process if its torchrun agent dies during the block; without torchrun, do nothing.

    The process gets SIGTERM, as if the agent had stopped it, and SIGKILL if the block has not ended after the grace.
    The kernel's parent death signal is not used: it also comes when the agent's thread that started this process ends.

    `grace_s`: seconds from SIGTERM to SIGKILL.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    agent, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_S):
            if os.getppid() != agent:
                log.warning("torchrun's agent, process %d, is gone: stopping", agent)
                os.kill(os.getpid(), signal.SIGTERM)
                if not over.wait(grace_s):
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    threading.Thread(target=watch, name="agent-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()
