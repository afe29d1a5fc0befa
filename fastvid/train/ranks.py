"""A process in a torchrun job: joining the group, naming a rank that has ended, broadcasts, stopping on a signal.

**Rendezvous**: the ranks of one attempt (a start or restart of the workers by torchrun) agree on a key prefix in
torchrun's store that no other attempt has used. torchrun's agent keeps one store over restarts, and in torch 2.13 every
attempt uses the same keys in it. Restarted workers may therefore read the addresses of their dead predecessors:
measured with two ranks on gloo, half of the restarts fail ("Connection refused") or hang. TORCHELASTIC_RESTART_COUNT
does not identify an attempt, because every node counts separately (pytorch issue 135712). The ranks of an attempt
therefore identify each other by random numbers:

    every rank  writes a new random number under its rank
    rank 0      reads the numbers of all ranks, hashes them to a token, and writes the token under each number
    every rank  acknowledges the token that it finds under its number
    rank 0      writes "go" once all ranks have acknowledged; if a number changes before that, the old number was that
                of a dead rank, and rank 0 creates a new token

A dead rank cannot acknowledge a token, because every token depends on the new number of rank 0.

**Ends**: a rank exits if its torchrun agent has died, so that it does not train beside the ranks of a restarted job.
When a collective operation fails, gloo and NCCL name at most an address. So every rank knows the host and process ID of
the others, and a rank that fails with an error of its own writes it to the job's store, where the others read it.

Known bug of torch 2.13: when a node joins a running job of ``torchrun --nnodes MIN:MAX``, the old node does not publish
its master address in the new round, and both agents fail after 60 s, unless the workers are told not to share the
rendezvous store. torchrun reads that environment variable before it starts the workers, so a worker can only raise an
error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.runtime.processes import World, is_dead, namespace
from fastvid.runtime.values import sha256

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S: Final = 0.5

# Time to write a checkpoint after SIGTERM; torchrun, too, kills its workers after 30 s (torch 2.13,
# distributed/elastic/multiprocessing/api.py, PContext.close).
_GRACE_S: Final = 30.0


@contextlib.contextmanager
def ending_with_agent(grace_s: float = _GRACE_S) -> Iterator[None]:
    """End this process if its torchrun agent dies during the block; without torchrun, do nothing.

    The process gets SIGTERM, as if the agent had stopped it, and SIGKILL if the block has not ended `grace_s` seconds
    later. The kernel's parent death signal (PR_SET_PDEATHSIG) is not used: it also comes when only the agent's thread
    that started this process ends.
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


_KEY: Final = "fastvid/ended"
_PATIENCE_S: Final = 3.0  # wait for an end to show: a dying process closes its sockets before it has exited
_SILENCE_S: Final = 2 * _PATIENCE_S  # a store that does not answer for so long is out of reach
_PAUSE_S: Final = 0.05
_LONGEST: Final = 500  # characters of a reason

# Errors of collectives: gloo raises a plain RuntimeError, also inside backward().
_COLLECTIVE: Final = re.compile(r"gloo|nccl|c10d|connection (?:closed|reset)|process group", re.IGNORECASE)


def own_record() -> bytes:
    """Return the host, PID namespace and PID of this process as JSON, for the other ranks."""
    return json.dumps({"host": socket.gethostname(), "space": namespace(), "pid": os.getpid()}).encode()


class Peers:
    """The other ranks of a job, and how they ended; `records` are those of `own_record`, in order of the ranks."""

    def __init__(self, rank: int, records: Sequence[bytes], store: Store) -> None:
        self._rank, self._store = rank, store
        self._places: list[dict[str, Any]] = [json.loads(record) for record in records]

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for `error`: a WorkerError that names the dead ranks if a collective failed because
        of them, else `error` itself.

        Also writes this rank's own error, or which ranks are dead, to the store for the other ranks. A request to a
        store on a host that was cut off would wait for a quarter of an hour, so it is made in a thread of its own.
        """
        found = [self._unanswered(error) if _is_collective(error) else error]
        asking = threading.Thread(target=lambda: found.append(self._explained(error)), name="peers", daemon=True)
        asking.start()
        asking.join(_SILENCE_S)
        return found[-1]

    def _explained(self, error: Exception) -> Exception:
        if not _is_collective(error):
            reason = f"{type(error).__name__}: {error}"[:_LONGEST]
            self._tell({"reason": reason})
            if isinstance(error, FastvidError) and self._rank:
                # All ranks may fail with this error at once, and rank 0 prints it: then this rank need not.
                first = _wait(lambda: self._told(0), time.monotonic() + _PATIENCE_S)
                error.is_told = first.get("reason") == reason
            return error
        deadline = time.monotonic() + _PATIENCE_S
        lost = _wait(self._lost, deadline)
        self._tell({"lost": lost})
        if self._rank == 0:  # it may serve the store, so it waits until the others have written to it
            others = set(range(len(self._places))) - {self._rank, *lost}
            _wait(lambda: all(map(self._told, others)), deadline)
        if lost:
            return WorkerError(
                f"rank {self._rank} cannot continue: " + "; ".join(lost.values()),
                hint=f"see what rank {min(lost)} printed, then repeat the command: it resumes from the last checkpoint",
            )
        return self._unanswered(error)

    def _unanswered(self, error: Exception) -> WorkerError:
        return WorkerError(
            f"rank {self._rank} cannot continue: another rank does not answer: {str(error).splitlines()[0]}",
            hint="check the other ranks' output and the network, then repeat the command",
        )

    def _lost(self) -> dict[int, str]:
        """Return, by rank, a description of each other rank that has failed with its own error, died or is stopped."""
        found: dict[int, str] = {}
        for rank, place in enumerate(self._places):
            if rank == self._rank:
                continue
            who = f"rank {rank}, process {place['pid']} on {place['host']},"
            # First whether it has ended, then its message: a rank writes the reason before it exits.
            ended = _end_of(place)
            told = self._told(rank)
            if "lost" in told:  # it ended because of other ranks, and may know more about them
                found = {int(other): text for other, text in told["lost"].items() if int(other) != self._rank} | found
            elif "reason" in told:
                found[rank] = f"{who} failed with {told['reason'].splitlines()[0]}"
            elif ended:
                found[rank] = f"{who} {ended}"
        return found

    def _tell(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_KEY}/{self._rank}", json.dumps(what))

    def _told(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0, or with torchrun's agent
            if self._store.check([f"{_KEY}/{rank}"]):
                told: dict[str, Any] = json.loads(self._store.get(f"{_KEY}/{rank}"))
                return told
        return {}


# Process states in /proc/PID/stat, see proc(5).
_STATES: Final = {"Z": "has died", "X": "has died", "T": "is stopped", "t": "is stopped"}


def _wait(until: Callable[[], T], deadline: float) -> T:
    """Call a function until it returns something true or the deadline has passed; return what it returned last."""
    while not (found := until()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return found


def _end_of(place: Mapping[str, Any]) -> str:
    """Return how a process ended, or that it is stopped; empty if it runs or nothing is known about it."""
    if is_dead(place["space"], place["pid"]):
        return "has died"
    return _STATES.get(_state(place["pid"]), "") if place["space"] == namespace() else ""


def _state(pid: int) -> str:
    try:
        # Split after the last bracket: the process name before it, in brackets, may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _is_collective(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None


_ALL_NODES: Final = "check that all nodes are started, with the same rendezvous endpoint, and can reach it"


@contextlib.contextmanager
def as_worker_error(
    what: str,
    *,
    hint: str = "check that the other process is running and reachable from this machine",
    **where: str | int,
) -> Iterator[None]:
    """Convert errors of sockets, and of torch's stores and process groups, to WorkerError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise WorkerError(f"{what}: {error}", hint=hint, **where) from error


def meet(timeout_s: float) -> tuple[World, Store]:
    """Return rank and world size in this job from torchrun, and a store that no other attempt of the job has used.

    `timeout_s`: seconds to wait for the other ranks.
    """
    with as_worker_error(f"the ranks did not connect within {timeout_s:g} s", hint=_ALL_NODES, master=_master()):
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    world = World(rank, size)
    return world, fresh_store(store, world, timeout_s)


def _master() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


_PREFIX: Final = "fastvid"
_RENDEZVOUS_PAUSE_S: Final = 0.02  # between two polls of the store; startup takes seconds anyway


def fresh_store(store: Store, world: World, timeout_s: float) -> Store:
    """Return a prefix of `store` that the ranks of this attempt share and that no other attempt has used.

    `timeout_s`: seconds to wait for the other ranks.
    """
    number = uuid.uuid4().hex
    store.set(f"{_PREFIX}/place/{world.rank}", number)
    deadline = time.monotonic() + timeout_s
    polls = _leader(store, world) if world.rank == 0 else _follower(store, number)
    while (token := next(polls)) is None:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"rank {world.rank} of {world.size} waited {timeout_s:g} s for the other ranks",
                hint=_ALL_NODES,
            )
        time.sleep(_RENDEZVOUS_PAUSE_S)
    return PrefixStore(f"{_PREFIX}/{token}", store)


def _leader(store: Store, world: World) -> Iterator[str | None]:
    """Yield, as rank 0, None for each look at the store until all ranks have acknowledged the token, then the token."""
    places = [f"{_PREFIX}/place/{rank}" for rank in range(world.size)]
    offered = ""
    while True:
        if store.check(places):
            numbers = [number.decode() for number in store.multi_get(places)]
            token = sha256("".join(numbers).encode())
            if token != offered:
                offered = token
                for number in numbers:
                    store.set(f"{_PREFIX}/seat/{number}", token)
            if store.add(f"{_PREFIX}/seen/{token}", 0) >= world.size - 1:
                store.set(f"{_PREFIX}/go/{token}", "go")
                yield token
        yield None


def _follower(store: Store, number: str) -> Iterator[str | None]:
    """Yield, as any other rank, None for each look at the store until rank 0 has written "go", then the token."""
    seat, seen = f"{_PREFIX}/seat/{number}", ""
    while True:
        if store.check([seat]):
            token = store.get(seat).decode()
            if token != seen:
                seen = token
                store.add(f"{_PREFIX}/seen/{token}", 1)
            if store.check([f"{_PREFIX}/go/{token}"]):
                yield token
        yield None


# `torch.distributed.nn` is imported at the top, before a process group exists: its functions have the group at import
# time as a default argument. If DDP imported it later, they would keep our group alive until the interpreter exits.


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
    dies, see `fastvid.train.ranks`.

    `timeout_s`: seconds to wait for another rank, here and in every later collective operation.
    """
    device = device_of(os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield Member(World(), device)
        return
    check_rendezvous(os.environ, agent_command())
    world, store = meet(timeout_s)
    nccl = device.type == "cuda" and not shares_devices(os.environ)
    with as_worker_error(f"no process group formed within {timeout_s:g} s", hint=_ALL_NODES, master=_master()):
        # With device_id NCCL connects at once, so a rank that cannot connect raises here, not in the first step.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if nccl else None,
        )
    member = Member(world, device)
    peers = Peers(world.rank, gather_bytes(own_record(), member), store)
    try:
        with ending_with_agent():
            yield member
    except Exception as error:
        explained = peers.explain(error)
        if explained is error:
            raise
        raise explained from error
    # Only on success: with a dead rank this would block, and the process exits anyway. The group's threads end when its
    # last reference is dropped. Reference cycles of the run may contain one, so collect them. A remaining gloo thread
    # that releases a tensor at interpreter exit aborts the process ("terminate called without an active exception").
    gc.collect()
    dist.destroy_process_group()


def shares_devices(environment: Mapping[str, str]) -> bool:
    """Return whether ranks of this job may share a GPU, see `SHARED_DEVICE`."""
    return environment.get(SHARED_DEVICE) == "1"


def device_of(environment: Mapping[str, str]) -> torch.device:
    """Return the device of a rank: the GPU whose number is the local rank, or the CPU on machines without a GPU."""
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
    """Raise UsageError if the number of nodes may change and the job shares torchrun's rendezvous store.

    See the known bug in the module docstring.
    """
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
    """Return the rank whose `value` is highest, the lowest such rank on ties; the same on every rank."""
    values = [int(text) for text in gather_bytes(str(value).encode(), member)]
    return values.index(max(values))


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


class Interrupted(Exception):
    """A run was told to stop by a signal while it waited for another process, before its first step."""


class StopSignal:
    """Records SIGTERM and SIGINT, so that a run stops after the current step with a checkpoint.

    torchrun sends SIGTERM when it is stopped itself and when nodes join, and kills the workers after 30 s. The original
    handlers are restored after the first signal, so a second one has its usual effect, and at the end of the block.
    """

    _SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
    _active: ClassVar[StopSignal | None] = None

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        StopSignal._active = self
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        StopSignal._active = None
        self._restore()

    @classmethod
    def pending(cls) -> bool:
        """Whether this process was told to stop; for code that waits for another process."""
        return cls._active is not None and cls._active.requested

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
