"""The whole idea of fastvid in one sitting: which clip comes when, which packets it needs, and its batch.

`Loader` here reads what `fastvid shard` wrote and yields the very clips of

    fastvid.ClipLoader(dataset, frames=Segments(8), spatial=[RandomResizedCrop(112), HorizontalFlip()],
                       global_batch_size=16, output=Output(dtype=torch.uint8))

by seed, epoch, position and rank, bit for bit (tests/examples/test_small.py), with nothing of fastvid but the files.
The product adds what a job needs: stores, other back-ends, threads, processes, devices, errors that name what is wrong.

1. Randomness: a number is a hash of (seed, epoch, position, purpose, index). No generator has a state.
2. Order: an epoch is a permutation that is a function of (seed, epoch). A resume is a position.
3. Decision: a sample's frames, crop and flip follow from the numbers of its position, before anything is read.
4. Plan: of a table of all packets, the fewest that decode the wanted frames.
5. Read: those byte ranges and no other, each with its checksum.
6. Decode: those packets and no other, in a decoder that stays open.

    python examples/small.py shards/mine
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pyarrow.parquet as pq
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

FRAMES, SIZE = 8, 112
SCALE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # of RandomResizedCrop, as in torchvision

# ---------------------------------------------------------------------------------------------------------------------
# 1. Randomness: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) from a state of its own for each position and purpose.

GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
FOR_FRAMES, FOR_CROP, FOR_FLIP = 1, 2, 3  # purposes: independent numbers


def mix(word: int) -> int:
    """Scramble 64 bits; no two words give the same."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


class Draws(NamedTuple):
    """The random numbers of one clip."""

    seed: int
    epoch: int
    position: int

    def words(self, purpose: int, count: int) -> list[int]:
        """Return uniform 64-bit words."""
        state = 0
        for word in (*self, purpose):
            state = mix(((state ^ word) + GOLDEN) & MASK)
        return [mix((state + number * GOLDEN) & MASK) for number in range(1, count + 1)]

    def uniform(self, purpose: int, count: int) -> list[float]:
        """Return numbers in [0, 1)."""
        return [(word >> 11) * 2.0**-53 for word in self.words(purpose, count)]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Order: samples sorted by a keyed hash. (Above 65,536 samples the product computes a position alone, without
# sorting: a Feistel network.)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the sample of each position of an epoch, int64 [count]."""
    text = struct.pack("<QQQ", seed, epoch, count) + b"fastvid-order-1"
    digest = hashlib.blake2b(text, digest_size=32).digest()
    start = int.from_bytes(digest[24:], "little")
    hashes = [mix((start + number * GOLDEN) & MASK) for number in range(1, count + 1)]
    return np.argsort(np.array(hashes, dtype=np.uint64), kind="stable")


# ---------------------------------------------------------------------------------------------------------------------
# 3. Decision: which frames, which part of the picture, mirrored or not.


class View(NamedTuple):
    """What a clip shows of its video."""

    frames: list[int]
    box: tuple[int, int, int, int]  # y, x, height and width in pixels, all even: 4:2:0 is cut at even pixels
    flip: bool


def decide(num_frames: int, height: int, width: int, draws: Draws) -> View:
    """Decide a clip of a video: pure arithmetic, the same on every rank and after every restart."""
    return View(segments(num_frames, draws), crop(height & ~1, width & ~1, draws), draws.uniform(FOR_FLIP, 1)[0] < 0.5)


def segments(num_frames: int, draws: Draws) -> list[int]:
    """Return one random frame of each of FRAMES equal segments (Temporal Segment Networks, ECCV 2016)."""
    step = num_frames // FRAMES
    drawn = [(word * (step or num_frames)) >> 64 for word in draws.words(FOR_FRAMES, FRAMES)]
    if step:
        return [segment * step + frame for segment, frame in enumerate(drawn)]
    return [0] * FRAMES  # fewer frames than segments


def crop(height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
    """Return a region of random area and shape: RandomResizedCrop, with sides rounded to even numbers."""
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    numbers = draws.uniform(FOR_CROP, 4 * TRIES)
    for size, shape, down, along in zip(*[iter(numbers)] * 4, strict=True):
        area = height * width * (SCALE[0] + size * (SCALE[1] - SCALE[0]))
        aspect = math.exp(low + shape * (high - low))
        rows, columns = even(math.sqrt(area / aspect)), even(math.sqrt(area * aspect))
        if rows <= height and columns <= width:
            y, x = (2 * int(at * ((whole - part) // 2 + 1)) for at, whole, part in
                    ((down, height, rows), (along, width, columns)))  # fmt: skip
            return y, x, rows, columns
    rows, columns = min(height, even(width / RATIO[0])), min(width, even(height * RATIO[1]))
    return (height - rows) // 2 & ~1, (width - columns) // 2 & ~1, rows, columns


def even(pixels: float) -> int:
    """Return the nearest even number, at least 2."""
    return max(2, 2 * int(pixels / 2 + 0.5))


# ---------------------------------------------------------------------------------------------------------------------
# The files. `.pkt` has, for every video of a shard, its description and a table of all its packets (docs/format.md).

HEADER = struct.Struct("<4s2HQ4IQ32s2I")
STREAM = np.dtype(
    "<u8,<u8,<u8,<u4,<u4,<u4,<u4,<u4,<u4,<u2,<u2,u1,u1,u1,u1,<f4,<u4",
)
STREAM.names = (
    "member_offset", "member_size", "first_packet", "num_packets", "num_frames", "extradata_offset", "extradata_size",
    "fps_num", "fps_den", "width", "height", "codec", "range", "matrix", "flags", "flow_bound", "packets_crc32",
)  # fmt: skip
PACKET = np.dtype([("offset", "<u4"), ("size", "<u4"), ("crc32", "<u4"), ("frame", "<i4"), ("flags", "u1"), ("", "V3")])
KEY, UNREFERENCED = 1, 2  # flags of packets: decoding may start here; no other packet refers to it
H264 = 1


class Video(NamedTuple):
    """One video: where it lies in its tar, and its packets in decode order."""

    tar: Path
    at: int  # first byte of its MP4 in the tar
    width: int
    height: int
    num_frames: int
    extradata: bytes
    packets: np.ndarray  # PACKET [P]


def open_dataset(folder: Path) -> list[Video]:
    """Return the videos of the current generation of a dataset."""
    current = json.loads((folder / "dataset.json").read_text())["generation"]
    generation = json.loads((folder / f"generations/{current:06}.json").read_text())
    videos = [video for shard in generation["shards"] for video in open_shard(folder, shard["name"])]
    removed = pq.read_table(folder / f"annotations-{current:06}.parquet", columns=["removed"])["removed"].to_pylist()
    return [video for video, gone in zip(videos, removed, strict=True) if not gone]


def open_shard(folder: Path, name: str) -> Iterator[Video]:
    """Yield the videos of a shard."""
    data = (folder / f"{name}.pkt").read_bytes()
    magic, major, _, samples, streams, stream_bytes, packet_bytes, extra, _, _, audio, _ = HEADER.unpack_from(data)
    if (magic, major, streams, packet_bytes) != (b"FVPK", 2, 1, PACKET.itemsize) or stream_bytes < STREAM.itemsize:
        sys.exit(f"{name}.pkt: this program reads one stream of format 2 in each sample")
    at = HEADER.size
    rows = [np.frombuffer(data, STREAM, 1, at + row * stream_bytes)[0] for row in range(samples)]
    at += samples * stream_bytes
    extradata = data[at : at + extra]
    at += extra + audio
    for row in rows:
        if row["codec"] != H264:
            sys.exit(f"{name}.pkt: this program decodes H.264, as the profiles compact and intra write it")
        packets = np.frombuffer(data, PACKET, row["num_packets"], at + int(row["first_packet"]) * PACKET.itemsize)
        if zlib.crc32(packets.tobytes()) != row["packets_crc32"]:
            sys.exit(f"{name}.pkt: a table of packets does not match its checksum")
        start = row["extradata_offset"]
        yield Video(
            folder / f"{name}.tar", int(row["member_offset"]), int(row["width"]), int(row["height"]),
            int(row["num_frames"]), extradata[start : start + row["extradata_size"]], packets,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# 4. Plan: the one rule that the rest exists for.


def plan(packets: np.ndarray, frames: list[int]) -> np.ndarray:
    """Return which packets decode some frames, rows in decode order.

    Of each wanted frame: its own packet, and every packet that others refer to from the last key packet before it. What
    nothing refers to, seven of eight packets of `compact`, is neither read nor decoded unless its frame is wanted.
    """
    is_key, referred_to = packets["flags"] & KEY != 0, packets["flags"] & UNREFERENCED == 0
    keys = np.flatnonzero(is_key)
    needed = np.zeros(len(packets), dtype=bool)
    for target in np.flatnonzero(np.isin(packets["frame"], frames)):
        key = keys[np.searchsorted(keys, target, side="right") - 1]
        needed[key:target] |= referred_to[key:target]
        needed[target] = True
    return np.flatnonzero(needed)


# ---------------------------------------------------------------------------------------------------------------------
# 5. and 6. Read and decode.


class Decoder:
    """Decodes clips; its H.264 decoder stays open from clip to clip, one for each kind of stream."""

    def __init__(self) -> None:
        self._contexts: dict[bytes, av.VideoCodecContext] = {}
        self._scale = VideoReformatter()

    def clip(self, video: Video, view: View) -> np.ndarray:
        """Return the RGB of a clip, uint8 [3, T, SIZE, SIZE]."""
        clip = np.empty((3, len(view.frames), SIZE, SIZE), dtype=np.uint8)
        for number, picture in self._frames(video, view):
            rgb = self._rgb(picture, view)
            for place, frame in enumerate(view.frames):
                if frame == number:
                    clip[:, place] = rgb
        return clip

    def _frames(self, video: Video, view: View) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the wanted frames with their numbers."""
        context = self._contexts.pop(video.extradata, None) or _h264(video.extradata)
        wanted = set(view.frames)
        with video.tar.open("rb") as tar:
            for record in video.packets[plan(video.packets, view.frames)]:
                tar.seek(video.at + int(record["offset"]))
                data = tar.read(int(record["size"]))
                if zlib.crc32(data) != record["crc32"]:
                    sys.exit(f"{video.tar}: a packet does not match its checksum")
                packet = av.Packet(data)
                packet.pts = int(record["frame"])  # a frame gets the pts of its packet: its own number
                yield from ((f.pts, f) for f in context.decode(packet) if f.pts in wanted)
        yield from ((f.pts, f) for f in context.decode(None) if f.pts in wanted)
        context.flush_buffers()
        self._contexts[video.extradata] = context  # only after a clip without errors

    def _rgb(self, picture: av.VideoFrame, view: View) -> np.ndarray:
        """Cut a picture while it is YUV, then resize and convert what is left; uint8 [3, SIZE, SIZE]."""
        y, x, rows, columns = view.box
        planes = []
        for plane, step in zip(picture.planes, (1, 2, 2), strict=True):
            whole = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
            planes.append(whole[y // step : (y + rows) // step, x // step : (x + columns) // step].ravel())
        cut = av.VideoFrame.from_ndarray(np.concatenate(planes).reshape(-1, columns), format="yuv420p")
        scaled = self._scale.reformat(
            cut, SIZE, SIZE, "gbrp", src_colorspace=Colorspace.ITU601, dst_colorspace=Colorspace.ITU601,
            src_color_range=ColorRange.MPEG, dst_color_range=ColorRange.JPEG, interpolation=Interpolation.BILINEAR,
            threads=1,
        )  # fmt: skip
        rgb = scaled.to_ndarray().transpose(2, 0, 1)
        return rgb[..., ::-1] if view.flip else rgb


def _h264(extradata: bytes) -> av.VideoCodecContext:
    context = av.CodecContext.create("h264", "r")
    context.extradata, context.thread_count, context.options = extradata, 1, {"strict": "1"}
    return context


# ---------------------------------------------------------------------------------------------------------------------
# The loader: an iterator whose whole state is (seed, epoch, position), the same for every number of ranks.


class Loader:
    """Yields the batches of one rank: positions int64 [b], and RGB uint8 [b, 3, T, SIZE, SIZE]."""

    def __init__(
        self, folder: str, global_batch_size: int, *, seed: int = 0, epoch: int = 0, position: int = 0,
        rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        self.videos = open_dataset(Path(folder))
        self.size, self.rank, self.world_size = global_batch_size, rank, world_size
        self.seed, self.epoch, self.position = seed, epoch, position
        self._decoder = Decoder()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = epoch_order(len(self.videos), self.seed, self.epoch)
        first, end = (number * self.size // self.world_size for number in (self.rank, self.rank + 1))
        while self.position + self.size <= len(order):
            positions = np.arange(self.position + first, self.position + end)
            clips = [self._clip(self.videos[order[position]], int(position)) for position in positions]
            self.position += self.size
            yield positions, np.stack(clips)
        self.epoch, self.position = self.epoch + 1, 0

    def _clip(self, video: Video, position: int) -> np.ndarray:
        view = decide(video.num_frames, video.height, video.width, Draws(self.seed, self.epoch, position))
        return self._decoder.clip(video, view)


if __name__ == "__main__":
    for positions, clips in Loader(sys.argv[1], global_batch_size=4):
        print(positions, clips.shape, round(float(clips.mean()), 2))
