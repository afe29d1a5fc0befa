"""A process's place in a torchrun job: joining the process group, noticing the end, telling the others.

Known trap of torch 2.13: when a node joins a running job of ``torchrun --nnodes MIN:MAX``, the old node does not
publish its master address in the new round, and both agents die after 60 s, unless the agents do not share the
rendezvous' store. torchrun reads the variable that says so before it starts the workers, so a worker can only refuse.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

import torch
import torch.distributed as dist

# Its functions have the process group of the time of import as a default argument. Imported later, as DDP does, they
# would hold our group, and its threads, until the interpreter ends.
import torch.distributed.nn
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fastvid.errors import UsageError, WorkerError
from fastvid.runtime.world import World
from fastvid.train.ranks.rendezvous import fresh_store

log = logging.getLogger(__name__)

UNSHARED_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable of torchrun's environment, "1" keeps the rendezvous' store and the workers' apart."""

# What torchrun's agent tells its workers about the variable above (elastic/agent/server/local_elastic_agent.py).
_STORE_IS_SHARED: Final = "TORCHELASTIC_USE_AGENT_STORE"
_NNODES_FLAG: Final = "--nnodes"
_NNODES_VARIABLE: Final = "PET_NNODES"


@dataclass(frozen=True, slots=True)
class Member:
    """This process in its job.

    Attributes:
        world: Rank and number of processes.
        device: Where it computes.
    """

    world: World
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.world.rank == 0


@contextlib.contextmanager
def join(timeout_s: float) -> Iterator[Member]:
    """Joins the process group that torchrun's environment describes; without one, a process stands alone.

    CPU tensors travel by gloo, CUDA tensors by NCCL.

    Args:
        timeout_s: How long to wait for a peer, here and in every collective afterwards.

    Raises:
        UsageError: The job is elastic and would not survive a node that joins.
        WorkerError: The group does not form in time.
    """
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        yield Member(World(), torch.device("cuda" if cuda else "cpu"))
        return
    check_rendezvous(os.environ, agent_command())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        if os.environ.get(_STORE_IS_SHARED) == "True":
            store = fresh_store(store, World(rank, size), timeout_s)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"the process group did not form within {timeout_s:g} s: {error}",
            hint="are all nodes started, with one rendezvous endpoint that each can reach?",
            master=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        ) from error
    yield Member(World(dist.get_rank(), dist.get_world_size()), device)
    # Only after success: with a dead peer this would wait for it, and the process ends anyway. The group's threads end
    # with the last reference to it, and what is left of the run in cycles holds some. A gloo thread that gives back a
    # tensor while the interpreter ends aborts the process ("terminate called without an active exception").
    gc.collect()
    dist.destroy_process_group()


def check_rendezvous(environment: Mapping[str, str], command: Sequence[str]) -> None:
    """Stops a worker of an elastic job whose agents share the rendezvous' store.

    Args:
        environment: Of the worker.
        command: Command line of the torchrun agent that started it; empty when unknown, which leaves the variable
            ``PET_NNODES`` as the only source of the node range.

    Raises:
        UsageError: The number of nodes may change and the variable is not set.
    """
    nodes = _nnodes(command) or environment.get(_NNODES_VARIABLE, "")
    least, colon, most = nodes.partition(":")
    if not colon or least == most or environment.get(_STORE_IS_SHARED) != "True":
        return
    raise UsageError(
        f"the job may change its nodes (--nnodes {nodes}), and with torch {torch.__version__} a node that joins "
        "would end it after 60 s",
        hint=f"put this line before torchrun, on every node: export {UNSHARED_STORE}=1",
    )


def agent_command() -> list[str]:
    """Command line of the process that started this one; empty where the system does not tell."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _nnodes(command: Sequence[str]) -> str:
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        # argparse accepts any unambiguous beginning of a flag; "--nn" is the shortest one.
        if len(name) >= len("--nn") and _NNODES_FLAG.startswith(name):
            return value if equals else next(iter(command[index + 1 :]), "")
    return ""


def highest(value: int, member: Member) -> int:
    """The rank with the highest value, the lowest such rank; the same on every rank."""
    if member.world.size == 1:
        return 0
    values = torch.zeros(member.world.size, dtype=torch.int64)
    values[member.world.rank] = value
    dist.all_reduce(values)
    return int(values.argmax())


def broadcast_bytes(data: bytes | None, member: Member, source: int = 0) -> bytes | None:
    """What one rank has, on every rank. None stays None."""
    if member.world.size == 1:
        return data
    size = torch.tensor([-1 if data is None else len(data)])
    dist.broadcast(size, source)
    length = int(size)
    if length < 0:
        return None
    # bytearray: torch refuses read-only memory without a warning.
    buffer = torch.frombuffer(bytearray(data or length), dtype=torch.uint8) if length else torch.empty(0).byte()
    dist.broadcast(buffer, source)
    return buffer.numpy().tobytes()


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Give every rank the tensors of rank 0; one message for each type."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        message = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(message, 0)
        parts = torch.split_with_sizes(message, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


class StopSignal:
    """Remembers SIGTERM and SIGINT, so that a run ends at a step's boundary with a checkpoint.

    torchrun sends SIGTERM when its own end is asked for and when nodes join, and kills after 30 s. A second signal does
    what it did before. Handlers are put back on exit.
    """

    _SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
