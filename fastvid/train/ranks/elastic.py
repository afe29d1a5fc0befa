"""A process in a torchrun job: joining the process group, broadcasts, and stopping on a signal.

Known bug of torch 2.13: when a node joins a running job of ``torchrun --nnodes MIN:MAX``, the old node does not publish
its master address in the new round, and both agents fail after 60 s, unless the workers are told not to share the
rendezvous store. torchrun reads that environment variable before it starts the workers, so a worker can only raise an
error.
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

# The functions of this module have the process group at import time as a default argument. If DDP imported it later,
# they would keep our group and its threads alive until the interpreter exits.
import torch.distributed.nn
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fastvid.errors import UsageError, WorkerError
from fastvid.runtime.world import World
from fastvid.train.ranks.agent import ending_with_agent
from fastvid.train.ranks.peers import Peers, own_record
from fastvid.train.ranks.rendezvous import fresh_store

log = logging.getLogger(__name__)

UNSHARED_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable of torchrun; "1" gives the workers a store separate from the rendezvous store."""

SHARED_DEVICE: Final = "FASTVID_SHARE_GPU"
"""Environment variable; "1" lets ranks share GPUs: CUDA tensors use gloo, because NCCL refuses two ranks on one GPU.

It is for tests of distributed training on a machine with fewer GPUs than ranks: gloo copies through the host.
"""

# Set by torchrun's agent for its workers, from the variable above (elastic/agent/server/local_elastic_agent.py).
_STORE_IS_SHARED: Final = "TORCHELASTIC_USE_AGENT_STORE"
_NNODES_FLAG: Final = "--nnodes"
_NNODES_VARIABLE: Final = "PET_NNODES"


@dataclass(frozen=True, slots=True)
class Member:
    """The rank and device of this process in its job."""

    world: World
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.world.rank == 0


@contextlib.contextmanager
def join(timeout_s: float) -> Iterator[Member]:
    """Join the process group described by torchrun's environment; without torchrun, the world size is 1.

    CPU tensors use gloo, CUDA tensors use NCCL, or gloo if `SHARED_DEVICE` is set. The process ends if torchrun's agent
    dies, see `fastvid.train.ranks.agent`.

    `timeout_s`: seconds to wait for a peer, here and in every later collective.
    """
    device = device_of(os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield Member(World(), device)
        return
    check_rendezvous(os.environ, agent_command())
    limit = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        if os.environ.get(_STORE_IS_SHARED) == "True":
            store = fresh_store(store, World(rank, size), timeout_s)
        nccl = device.type == "cuda" and not shares_devices(os.environ)
        # With its device, NCCL connects here, and a peer that cannot is an error here; else in the first step.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if nccl else None,
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"the process group did not form within {timeout_s:g} s: {error}",
            hint="check that all nodes are started, with the same rendezvous endpoint, and can reach it",
            master=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        ) from error
    member = Member(World(dist.get_rank(), dist.get_world_size()), device)
    peers = Peers(rank, gather_bytes(own_record(), member), store)
    try:
        with ending_with_agent():
            yield member
    except Exception as error:
        explained = peers.explain(error)
        if explained is error:
            raise
        raise explained from error
    # Only on success: with a dead peer this would block, and the process exits anyway. The group's threads end when the
    # last reference is dropped, and reference cycles of the run may contain one, hence the collection. A gloo thread
    # that releases a tensor at interpreter exit aborts the process ("terminate called without an active exception").
    gc.collect()
    dist.destroy_process_group()


def shares_devices(environment: Mapping[str, str]) -> bool:
    """Return whether ranks of this job may share a GPU, see `SHARED_DEVICE`."""
    return environment.get(SHARED_DEVICE) == "1"


def device_of(environment: Mapping[str, str]) -> torch.device:
    """Return the device of a rank: the GPU with its local rank's number, or the CPU on machines without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, count = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count and not shares_devices(environment):
        raise UsageError(
            f"local rank {rank} has no GPU, this machine has {count}",
            hint=f"start {count} ranks per machine; to test with more, set {SHARED_DEVICE}=1",
        )
    return torch.device("cuda", rank % count)


def check_rendezvous(environment: Mapping[str, str], command: Sequence[str]) -> None:
    """Raise an error in a worker of an elastic job that shares the rendezvous store."""
    nodes = _nnodes(command) or environment.get(_NNODES_VARIABLE, "")
    least, colon, most = nodes.partition(":")
    if not colon or least == most or environment.get(_STORE_IS_SHARED) != "True":
        return
    raise UsageError(
        f"the number of nodes may change (--nnodes {nodes}), and with torch {torch.__version__} the job would fail "
        "60 s after a node joins",
        hint=f"put this line before torchrun, on every node: export {UNSHARED_STORE}=1",
    )


def agent_command() -> list[str]:
    """Return the command line of the parent process; empty if the system does not provide it."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _nnodes(command: Sequence[str]) -> str:
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        # argparse accepts any unambiguous prefix of a flag; "--nn" is the shortest one.
        if len(name) >= len("--nn") and _NNODES_FLAG.startswith(name):
            return value if equals else next(iter(command[index + 1 :]), "")
    return ""


def highest(value: int, member: Member) -> int:
    """Return the rank with the highest value, the lowest one on ties; the same on every rank."""
    if member.world.size == 1:
        return 0
    values = torch.zeros(member.world.size, dtype=torch.int64)
    values[member.world.rank] = value
    dist.all_reduce(values)
    return int(values.argmax())


def broadcast_bytes(data: bytes | None, member: Member, source: int = 0) -> bytes | None:
    """Broadcast bytes or None from the rank `source`, and return them on every rank."""
    if member.world.size == 1:
        return data
    size = torch.tensor([-1 if data is None else len(data)])
    dist.broadcast(size, source)
    length = int(size)
    if length < 0:
        return None
    # bytearray, because torch warns about read-only memory.
    buffer = torch.frombuffer(bytearray(data or length), dtype=torch.uint8) if length else torch.empty(0).byte()
    dist.broadcast(buffer, source)
    return buffer.numpy().tobytes()


def gather_bytes(data: bytes, member: Member) -> list[bytes]:
    """Return the bytes of every rank, in order, on every rank."""
    if member.world.size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(member.world.size)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(map(int, sizes))
    own = torch.frombuffer(bytearray(data.ljust(longest + 1)), dtype=torch.uint8)
    buffers = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(buffers, own)
    return [buffer[: int(size)].numpy().tobytes() for buffer, size in zip(buffers, sizes, strict=True)]


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Broadcast the tensors of rank 0 to every rank, with one message per dtype."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        message = torch.cat([tensor.reshape(-1) for tensor in same_dtype])
        dist.broadcast(message, 0)
        parts = torch.split_with_sizes(message, [tensor.numel() for tensor in same_dtype])
        for tensor, part in zip(same_dtype, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


class StopSignal:
    """Records SIGTERM and SIGINT, so that a run stops after the current step with a checkpoint.

    torchrun sends SIGTERM when it is stopped itself and when nodes join, and kills the workers after 30 s. A second
    signal has its original effect. The original handlers are restored on exit.
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
        """Whether a signal was received."""
        return self.received is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
