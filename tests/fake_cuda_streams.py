"""Streams, events and blocks of memory of the fake CUDA, with their vector clocks; see `tests.fake_cuda_state`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


def join(clock, other):
    for stream, tick in other.items():
        clock[stream] = max(clock[stream], tick)


class Entry(NamedTuple):
    """One line of the log; `kind` is allocate, reuse, free, read, write, copy, record, wait, keep or device."""

    kind: str
    thread: str
    device: int
    stream: str
    what: str


class Access(NamedTuple):
    """A read or write of the bytes `start` to `stop` of a block, which was operation `tick` of a stream."""

    kind: str
    stream: Stream
    tick: int
    start: int
    stop: int


@dataclass(eq=False)
class Block:
    """A block of device memory, with the accesses that a later one may still collide with, and `record_stream`."""

    name: str
    device: int
    stream: Stream
    size: int
    accesses: list[Access] = field(default_factory=list)
    kept: dict[Stream, None] = field(default_factory=dict)


class Stream:
    """`torch.cuda.Stream`. `name` is "default" or "sN" in order of creation; `clock` is {stream: tick known}."""

    current = None  # the `FakeCuda` in use

    def __init__(self, device=None, priority=0, *, cuda=None, name=None):
        self.cuda = cuda or Stream.current
        self.index = self.cuda.index(device)
        self.device, self.priority = torch.device("cuda", self.index), priority
        self.number = next(self.cuda.numbers)
        self.name = name or f"s{self.number}"
        self.cuda_stream = 0 if name else 4096 + self.number
        self.tick, self.clock = 0, defaultdict(int)
        self.cuda.streams.append(self)

    def __repr__(self):
        return f"<stream {self.name} of cuda:{self.index}>"

    def launch(self):
        """Book an operation: it follows what the stream and the host know. Returns its tick."""
        join(self.clock, self.cuda.host)
        self.tick += 1
        self.clock[self] = self.tick
        return self.tick

    def wait_event(self, event):
        with self.cuda.lock:
            join(self.clock, event.clock)
            self.cuda.note("wait", self, event.name)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        with self.cuda.lock:
            join(self.cuda.host, self.clock)
            self.cuda.sync(self, f"stream {self.name}")

    def query(self):
        return True


class Event:
    """`torch.cuda.Event`. One that was never recorded orders nothing, as in CUDA."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.cuda = Stream.current
        self.name, self.clock, self.stream = f"e{next(self.cuda.numbers)}", defaultdict(int), None

    def record(self, stream=None):
        with self.cuda.lock:
            stream = stream or self.cuda.current_stream()
            stream.launch()
            self.clock, self.stream = stream.clock.copy(), stream
            self.cuda.note("record", stream, self.name)

    def wait(self, stream=None):
        (stream or self.cuda.current_stream()).wait_event(self)

    def synchronize(self):
        with self.cuda.lock:
            join(self.cuda.host, self.clock)
            self.cuda.sync(self.stream, f"event {self.name}")

    def query(self):
        return True

    def elapsed_time(self, _later):
        return 0.0
