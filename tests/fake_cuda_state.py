"""A CUDA of several devices for tests on a CPU: it keeps values, and checks which stream may touch which memory when.

`tests.fake_cuda.install` puts it in the place of `torch.cuda`, of torch's functions that allocate, and of `Tensor.to`.
Tensors "on cuda:N" are `DeviceTensor`: their values lie on the CPU and every operation runs at once, but
each is booked on the calling thread's current stream, and two accesses of one block of memory (one of them a write)
that nothing orders are entered in `races`.

Order is kept by vector clocks. A stream knows what was launched on it, what the host knew at each launch, and the
events it waited for. The host learns by `synchronize` of an event, a stream or a device. `Event.query` orders nothing.
All host threads count as one: they hand over work under locks, whose order is the real one.

Memory is reused as torch's caching allocator does, at once and by the stream that allocated it, with the history of its
previous life. `record_stream` keeps a block until that stream has done what was launched on it when the block is freed.
Host memory counts as pinned if torch was asked for it. What makes the host wait for the device is entered in `syncs`.
"""

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict

import torch
from torch.utils._pytree import tree_map

from tests.fake_cuda_streams import Access, Block, Entry, Stream, join

_ROUND = 512  # bytes: torch's allocator rounds sizes up to it

# Operations that take a tensor of the host beside one of a device, and those that make the host wait.
_MIXED = ("copy_", "index_put_", "index_put", "_index_put_impl_", "index")
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a CUDA device; `values` are on the CPU, `block` is the memory they stand for."""

    @staticmethod
    def __new__(cls, values, block):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="cpu",
        )
        made.values, made.block = values, block
        return made

    device = property(lambda self: torch.device("cuda", self.block.device))
    is_cuda = property(lambda _self: True)

    def get_device(self):
        return self.block.device

    def record_stream(self, stream):
        cuda = stream.cuda
        with cuda.lock:
            self.block.kept[stream] = None
            cuda.note("keep", stream, self.block.name)

    def numpy(self, **_):
        raise TypeError("can't convert a CUDA tensor to numpy")

    def data_ptr(self):
        return self.values.data_ptr()

    def __repr__(self, **_):
        return f"DeviceTensor({self.block.name}, {self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Stream.current.run(func, args, kwargs or {})


class FakeCuda:
    """The state of the fake: devices, streams, memory and what was noticed.

    Attributes:
        races: Sentences about accesses that nothing orders; a correct program leaves it empty.
        syncs: (thread, what) of each time the host waited for a device.
        log: Every `Entry`, in order.
    """

    def __init__(self, devices):
        self.devices, self.lock, self.numbers = devices, threading.RLock(), itertools.count()
        self.host, self.local = defaultdict(int), threading.local()
        self.races, self.syncs, self.log = [], [], []
        self.free, self.pinned, self.streams = defaultdict(list), {}, []
        Stream.current = self
        self.defaults = [Stream(index, cuda=self, name="default") for index in range(devices)]

    # Devices and streams of the calling thread.

    def index(self, device):
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            device = device.index
        device = self.current_device() if device is None else device
        if not 0 <= device < self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {device}")
        return device

    def current_device(self):
        return getattr(self.local, "device", 0)

    def set_device(self, device):
        self.local.device = self.index(device)
        with self.lock:
            self.note("device", self.current_stream(), f"cuda:{self.local.device}")

    @contextlib.contextmanager
    def device(self, device):
        before = self.current_device()
        self.local.device = self.index(device)
        try:
            yield
        finally:
            self.local.device = before

    def current_stream(self, device=None):
        index = self.index(device)
        return getattr(self.local, "streams", {}).get(index, self.defaults[index])

    def default_stream(self, device=None):
        return self.defaults[self.index(device)]

    def set_stream(self, stream):
        self.local.device = stream.index
        self.local.streams = getattr(self.local, "streams", {}) | {stream.index: stream}

    @contextlib.contextmanager
    def stream(self, stream):
        if stream is None:
            yield
            return
        device, before = self.current_device(), self.current_stream(stream.index)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            self.local.device = device

    def synchronize(self, device=None):
        with self.lock:
            stream = self.current_stream(device)
            for one in self.streams:
                if one.index == stream.index:
                    join(self.host, one.clock)
            self.sync(stream, f"device cuda:{stream.index}")

    # Memory.

    def allocate(self, nbytes, device=None):
        """Return a block of the caller's current stream: the last one freed of its size, else a new one."""
        with self.lock:
            stream, size = self.current_stream(device), -(-max(1, nbytes) // _ROUND) * _ROUND
            ready = self.free[stream, size]
            reused = bool(ready)
            block = ready.pop() if ready else Block(f"m{next(self.numbers)}", stream.index, stream, size)
            self.note("reuse" if reused else "allocate", stream, block.name)
            return block

    def release(self, block):
        """Return a block to the stream that allocated it."""
        with self.lock:
            # The allocator reuses a block only after these streams have done what was launched, so it is over.
            block.accesses = [one for one in block.accesses if one.stream not in block.kept]
            block.kept.clear()
            self.free[block.stream, block.size].append(block)
            self.note("free", block.stream, block.name)

    def wrap(self, values, device=None):
        """Return CPU values as a new tensor of a device, allocated on the current stream and not yet written."""
        values = values.detach()
        storage = values.untyped_storage()
        block = self.allocate(storage.nbytes(), device)
        # All views share the storage; the block is freed with the last of them.
        weakref.finalize(storage, self.release, block).atexit = False
        return DeviceTensor(values, block)

    def access(self, kind, tensor, stream, what):
        """Book a read or write, after `stream.launch`, and check that it follows what it depends on."""
        block, values, thread = tensor.block, tensor.values, threading.current_thread().name
        self.note(kind, stream, block.name)
        if not values.numel():
            return
        sides = zip(values.shape, values.stride(), strict=True)
        start = values.storage_offset()
        stop = start + sum((side - 1) * stride for side, stride in sides) + 1
        mine = Access(kind, stream, stream.tick, start * values.element_size(), stop * values.element_size())
        left = []
        for one in block.accesses:
            overlaps = one.start < mine.stop and mine.start < one.stop
            if (
                overlaps
                and "write" in (kind, one.kind)
                and one.stream is not stream
                and stream.clock[one.stream] < one.tick
            ):
                self.races.append(
                    f"{thread}: {what}, a {kind} of {block.name} on {stream}, has no order with"
                    f" a {one.kind} on {one.stream}"
                )
            covered = mine.start <= one.start and one.stop <= mine.stop
            if not covered or (kind == "read" and (one.kind == "write" or one.stream is not stream)):
                left.append(one)
        block.accesses = [*left, mine]

    def upload(self, values, device, non_blocking):
        """Copy a CPU tensor to a device."""
        with self.lock:
            made = self.wrap(values.clone(), device)
            stream = self.current_stream(device)
            stream.launch()
            self.access("write", made, stream, "copy")
            self.host_copy(values, stream, non_blocking)
            return made

    def download(self, tensor, non_blocking=False):
        """Copy a device tensor to new pageable memory, which waits for the stream."""
        with self.lock:
            stream = self.current_stream(tensor.block.device)
            stream.launch()
            self.access("read", tensor, stream, "copy")
            join(self.host, stream.clock)
            self.sync(stream, "copy to the host")
            return tensor.values.clone()

    def host_copy(self, values, stream, non_blocking):
        pinned = self.is_pinned(values)
        self.note("copy", stream, f"{'pinned' if pinned else 'pageable'} {values.numel() * values.element_size()}")
        if not (pinned and non_blocking):
            join(self.host, stream.clock)
            self.sync(stream, f"copy of {'pinned' if pinned else 'pageable'} memory")

    def pin(self, values):
        storage = values.untyped_storage()
        start = storage.data_ptr()
        self.pinned[start] = start + max(1, storage.nbytes())
        weakref.finalize(storage, self.pinned.pop, start, None).atexit = False
        return values

    def is_pinned(self, values):
        at = values.data_ptr()
        return any(start <= at < stop for start, stop in list(self.pinned.items()))

    # Operations.

    def run(self, func, args, kwargs):
        """Run an operation of `DeviceTensor` on the values, and book it on the current stream of their device."""
        written, seen, hosts = [], [], []
        schema = [
            (arg, args[n] if n < len(args) else kwargs.get(arg.name)) for n, arg in enumerate(func._schema.arguments)
        ]
        for arg, value in schema:
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, DeviceTensor):
                    (written if arg.alias_info and arg.alias_info.is_write else seen).append(one)
                elif isinstance(one, torch.Tensor) and (one.dim() or (arg.alias_info and arg.alias_info.is_write)):
                    hosts.append(one)
        name = func._schema.name.removeprefix("aten::")
        devices = {one.block.device for one in (*written, *seen)}
        if len(devices) > 1 and name != "copy_":
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:{sorted(devices)}")
        if hosts and name not in _MIXED:
            raise RuntimeError(f"Expected all tensors of {name} to be on the same device, but found cuda and cpu")
        with self.lock:
            device = (written or seen)[0].block.device
            stream = self.current_stream(device)
            with self.device(device):
                plain = tree_map(lambda one: one.values if isinstance(one, DeviceTensor) else one, (args, kwargs))
                made = func(*plain[0], **plain[1])
                homes = {one.values.untyped_storage().data_ptr(): one for one in (*seen, *written) if one.numel()}
                is_view = isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() in homes
                if not is_view or written:
                    stream.launch()
                    for one in seen:
                        self.access("read", one, stream, name)
                    for one in written:
                        self.access("write", one, stream, name)
                for host in hosts:
                    self.host_copy(
                        host, stream, name == "copy_" and (kwargs.get("non_blocking") or args[2:] == (True,))
                    )
                if name in _WAITS or (made is not None and not tree_has_tensor(made)):
                    join(self.host, stream.clock)
                    self.sync(stream, name)
                if hosts and made is hosts[0]:  # a copy from a device into memory of the host
                    return made
                return tree_map(lambda one: self.result(one, homes, written, stream), made)

    def result(self, made, homes, written, stream):
        if not isinstance(made, torch.Tensor):
            return made
        for one in written:
            if made is one.values:
                return one
        home = homes.get(made.untyped_storage().data_ptr())
        if home is not None:
            return DeviceTensor(made, home.block)
        tensor = self.wrap(made)
        self.access("write", tensor, stream, "result")
        return tensor

    # The log.

    def note(self, kind, stream, what):
        self.log.append(Entry(kind, threading.current_thread().name, stream.index, stream.name, what))

    def sync(self, stream, what):
        self.syncs.append((threading.current_thread().name, what))
        self.note("sync", stream, what)

    def entries(self, kind, thread=""):
        """Return the entries of a kind, of threads whose name begins with `thread`."""
        with self.lock:
            return [entry for entry in self.log if entry.kind == kind and entry.thread.startswith(thread)]


def tree_has_tensor(made):
    return any(isinstance(one, torch.Tensor) for one in (made if isinstance(made, list | tuple) else [made]))
