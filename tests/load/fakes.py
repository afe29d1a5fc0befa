"""A dataset in memory and decoders without a codec, for fast tests of order, threads and failures."""

import struct
import threading
import time
import zlib
from fractions import Fraction
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pyarrow as pa

from fastvid.decode.backends import Backend
from fastvid.decode.request import Planes, Rgb
from fastvid.errors import MissingDependency, StorageError, UsageError
from fastvid.format.packets import PacketTable, StreamInfo, packet_records
from fastvid.format.schema import FACT_FIELDS, Codec, PacketFlag
from fastvid.format.shard import StreamReader

SHARD_SAMPLES = 16
HEIGHT, WIDTH = 32, 48
ABC = ("a", "b", "c")
LOOKS = ((Fraction(25), HEIGHT, WIDTH),)


class MemoryStorage:
    """Files as bytes in memory, which tests can damage."""

    gap = 8 * 1024
    concurrency = 1
    units = None

    def __init__(self):
        self.files = {}

    def read_into(self, name, ranges, version=None):
        data = self.files[name]
        for offset, view in ranges:
            if offset + len(view) > len(data):
                raise StorageError("file ends inside a range", file=name)
            view[:] = data[offset : offset + len(view)]


class FakeShard:
    def __init__(self, storage, stem, first, lengths, looks):
        self.first, self.looks = first, looks
        self.storage, self.stem, self.data = storage, stem, f"{stem}.tar"
        self.lengths, self.tar_sha256, self.is_described = lengths, "", False
        data, self.members, self.tables = bytearray(), [], []
        for row, frames in enumerate(lengths):
            packets = [struct.pack("<II", first + row, frame) + bytes(frame % 5) for frame in range(frames)]
            sizes = [len(packet) for packet in packets]
            offsets = np.cumsum(sizes) - sizes
            crcs = [zlib.crc32(packet) for packet in packets]
            flags = [int(PacketFlag.KEY)] * frames
            self.tables.append(PacketTable(packet_records(offsets, sizes, crcs, range(frames), flags)))
            self.members.append((len(data), sum(sizes)))
            data += b"".join(packets)
        storage.files[self.data] = data

    def info(self, row, stream="rgb"):
        fps, height, width = self.looks[(self.first + row) % len(self.looks)]
        return StreamInfo(Codec.H264, width, height, self.lengths[row], fps)

    def table(self, row, stream="rgb"):
        return self.tables[row]

    def member(self, row, stream="rgb"):
        return self.members[row]

    def are_near(self, one, other):
        return False

    def reader(self, row, stream="rgb"):
        return StreamReader(self.storage, self.data, *self.members[row])

    def stream(self, row, stream="rgb"):
        return self.reader(row, stream), self.table(row, stream)


class FakeDataset:
    """`size` samples of 1 to 12 frames, in shards of 16; each has one of the `looks` in turn: frame rate, height and
    width."""

    streams = ("rgb",)
    depth: ClassVar = {}
    selection, identity = "", "the same"

    def __init__(
        self, size, *, dataset_id="fake", generation=1, split=None, where=None, classes=ABC, looks=LOOKS, extra=None
    ):
        self.classes, self.extra = classes, extra or {}
        self.size, self.dataset_id, self.split, self.where = size, dataset_id, split, where
        self.storage = MemoryStorage()
        self.lengths = [1 + (7 * sample) % 12 for sample in range(size)]
        self.labels = np.array([sample % 3 for sample in range(size)], dtype=np.int64)
        starts = range(0, size, SHARD_SAMPLES)
        self.shards = [
            FakeShard(self.storage, f"data-{i:06d}", start, self.lengths[start : start + SHARD_SAMPLES], looks)
            for i, start in enumerate(starts)
        ]
        self.generation = SimpleNamespace(number=generation, shards=[SimpleNamespace(name=s.stem) for s in self.shards])

    def __len__(self):
        return self.size

    def key(self, sample):
        return f"key{sample}"

    def keys_of(self, samples):
        return [self.key(sample) for sample in samples.tolist()]

    @property
    def annotations(self):
        """The columns of `extra`, and one of texts."""
        return pa.table({"note": [f"note-{sample}" for sample in range(self.size)], **self.extra})

    @property
    def column_names(self):
        return tuple(self.annotations.column_names)

    def column(self, name):
        if name in FACT_FIELDS or name == "num_frames":
            return pa.chunked_array([[self.fact(sample, name) for sample in range(self.size)]])
        if name not in self.column_names:
            raise UsageError(f"dataset has no column {name!r}")
        return self.annotations[name]

    def fact(self, sample, name):
        info = self.shards[sample // SHARD_SAMPLES].info(sample % SHARD_SAMPLES)
        known = {"fps": float(info.fps), "duration": float(info.num_frames / info.fps)}
        return known[name] if name in known else getattr(info, name)

    def locate(self, samples):
        return np.divmod(np.asarray(samples, dtype=np.int64), SHARD_SAMPLES)

    def shard(self, index):
        return self.shards[index]

    def is_open(self, index):
        return True

    def shard_name(self, index):
        return self.shards[index].stem

    @property
    def shard_sizes(self):
        return np.array([len(shard.lengths) for shard in self.shards], dtype=np.int64)

    def damage(self, sample):
        """Flip one bit in each of the sample's packets; a second call repairs them."""
        shard, row = divmod(sample, SHARD_SAMPLES)
        start, _ = self.shards[shard].members[row]
        for offset in self.shards[shard].tables[row].records["offset"].tolist():
            self.storage.files[self.shards[shard].data][start + offset + 1] ^= 4


def picture(sample, frame, box, flip):
    """Return the values of the three channels of a fake frame."""
    return sample % 251, frame, (3 * box.y + 5 * box.x + 7 * box.height + 11 * box.width + 128 * flip) % 256


class RgbDecoder:
    """Reads sample and frame from the packets and writes `picture`."""

    max_clips = 1
    outputs = frozenset({Rgb})
    opened = 0
    lock = threading.Lock()
    delay = 0.0

    def __init__(self):
        with RgbDecoder.lock:
            RgbDecoder.opened += 1
        self.users = threading.Lock()

    def decode(self, clips, outputs):
        assert self.users.acquire(blocking=False), "two threads in one decoder"
        try:
            assert 1 <= len(clips) <= self.max_clips
            for clip, output in zip(clips, outputs, strict=True):
                self.one(clip, output)
            return [None] * len(clips)
        finally:
            self.users.release()

    def one(self, clip, output):
        if self.delay:
            time.sleep(self.delay)
        seen = {}
        for start in clip.starts.tolist():
            sample, frame = struct.unpack_from("<II", clip.data, start)
            seen[frame] = sample
        request = clip.request
        for t, frame in enumerate(request.frames.tolist()):
            self.write(output, t, picture(seen[frame], frame, request.box, request.flip))

    def write(self, output, t, levels):
        output.data[:, t] = np.array(levels, dtype=np.uint8)[:, None, None]

    def close(self):
        pass


class GroupDecoder(RgbDecoder):
    """Takes up to five clips at once, as batch decoders do."""

    max_clips = 5
    groups: ClassVar[list[int]] = []

    def decode(self, clips, outputs):
        self.groups.append(len(clips))
        return super().decode(clips, outputs)


class PlanesDecoder(RgbDecoder):
    """Writes the frame number as grey."""

    outputs = frozenset({Planes})

    def write(self, output, t, levels):
        output.y[t], output.u[t], output.v[t] = 16 + 10 * levels[1], 128, 128


def fake(name="RgbDecoder"):
    """Return a back-end with a decoder of this file."""
    return Backend(name, f"tests.load.fakes:{name}", "cpu", frozenset(Codec), "nothing")


class CountingDecoder(RgbDecoder):
    """Counts clips."""

    decoded = 0

    def one(self, clip, output):
        super().one(clip, output)
        with RgbDecoder.lock:
            CountingDecoder.decoded += 1


class ReportingDecoder(RgbDecoder):
    """Reports every tenth sample as damaged."""

    def decode(self, clips, outputs):
        super().decode(clips, outputs)
        return [clip.error("multiple of ten") if clip.request.sample % 10 == 0 else None for clip in clips]


class BuggyDecoder(RgbDecoder):
    """Raises an unexpected exception."""

    def one(self, clip, output):
        return 1 // 0


class ClosedDecoder(RgbDecoder):
    """Fails to open."""

    def __init__(self):
        raise MissingDependency("no such device")


class HangingDecoder(RgbDecoder):
    """Hangs on sample 7."""

    go_on = threading.Event()

    def one(self, clip, output):
        if clip.request.sample == 7:
            self.go_on.wait()
        super().one(clip, output)
