"""Make videos for tests, and clips of them."""

import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from fastvid.decode.request import Box, ClipRequest, EncodedClip
from fastvid.format.mp4 import index_mp4
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import INPUT_PADDING, PacketFlag
from fastvid.media.ffmpeg import find_ffmpeg

BITS = 10
BLACK, WHITE = 16, 235

# As a filter, because ffmpeg 9 takes colour tags from the frames and ignores the encoder's options.
TAGS = "setparams=range=limited:colorspace=smpte170m:color_primaries=smpte170m:color_trc=smpte170m"
_X264 = "-c:v libx264 -threads 1 -preset veryfast -tune fastdecode -x264-params"
_X265 = "-c:v libx265 -tag:v hvc1 -x265-params log-level=none:pools=1:info=0"

# FFmpeg's arguments by name. The first three imitate the profiles of the same names.
ENCODINGS = {
    "compact": f"{_X264} keyint=32:min-keyint=32:scenecut=0:open-gop=0:bframes=7:b-adapt=0:b-pyramid=none",
    "intra": f"{_X264} keyint=1",
    "vp9": "-c:v libvpx-vp9 -g 12 -b:v 0 -crf 32 -auto-alt-ref 0 -lag-in-frames 0 -cpu-used 8",
    "vp9-intra": "-c:v libvpx-vp9 -g 1 -b:v 0 -crf 32 -auto-alt-ref 0 -lag-in-frames 0 -cpu-used 8",
    "mjpeg": "-pix_fmt yuvj420p -c:v mjpeg -q:v 3",
    "mjpeg-limited": "-pix_fmt yuv420p -strict unofficial -c:v mjpeg -q:v 3",
    "pyramid": f"{_X264} keyint=24:bframes=5:b-pyramid=normal:ref=4",
    "hevc": f"{_X265}:keyint=16:min-keyint=16:scenecut=0:bframes=4:b-adapt=0:b-pyramid=0:open-gop=0",
    "hevc-cra": f"{_X265}:keyint=8:min-keyint=8:scenecut=0:bframes=0:open-gop=1",
    "av1": "-c:v libaom-av1 -usage realtime -cpu-used 8 -g 16",
    "av1-layers": "-c:v libsvtav1 -preset 10 -g 33 -crf 40 -svtav1-params hierarchical-levels=3:scd=0:lookahead=17",
    "h264-422": f"-pix_fmt yuv422p {_X264} keyint=8:bframes=2:b-adapt=0:b-pyramid=none",
    "h264-10bit": f"-pix_fmt yuv420p10le {_X264} keyint=8:bframes=2:b-adapt=0:b-pyramid=none",
}
_UNTAGGED = ("mjpeg", "av1", "av1-layers")


def arguments(encoding: str, *filters: str) -> list[str]:
    """Return ffmpeg's arguments between input and output, for an encoding after some filters."""
    chain = [*filters, "null" if encoding in _UNTAGGED else TAGS]
    return ["-vf", ",".join(chain), *ENCODINGS[encoding].split()]


@dataclass(frozen=True)
class Video:
    """An MP4 in memory with its packet table."""

    path: Path

    @cached_property
    def data(self) -> bytes:
        """The file."""
        return self.path.read_bytes()

    @cached_property
    def _indexed(self) -> tuple[StreamInfo, np.ndarray]:
        return index_mp4(self.data, conforms=True)

    @property
    def info(self) -> StreamInfo:
        """The stream's parameters for a decoder."""
        return self._indexed[0]

    @property
    def records(self) -> np.ndarray:
        """PACKET_DTYPE records [P]."""
        return self._indexed[1]

    @cached_property
    def table(self) -> PacketTable:
        """The packet table."""
        return PacketTable(self.records, whole=bool(self.info.flags & 2))

    @property
    def full(self) -> Box:
        """A box of the whole frame."""
        return Box(0, 0, self.info.height, self.info.width)

    def clip(self, frames, *, box=None, size=None, flip=False, packets=None, info=None) -> EncodedClip:
        """Return a clip of these frames, ready for a decoder; `packets` overrides the plan."""
        wanted = np.asarray(frames, dtype=np.int64)
        box = box or self.full
        request = ClipRequest(0, wanted, box, size or (box.height, box.width), flip)
        records = self.records[self.table.plan(wanted).packets if packets is None else packets]
        sizes = records["size"].astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        data = bytearray(int(sizes.sum()) + INPUT_PADDING)
        for offset, size_, start in zip(records["offset"].tolist(), sizes.tolist(), starts.tolist(), strict=True):
            data[start : start + size_] = self.data[offset : offset + size_]
        return EncodedClip(
            request=request,
            info=info or self.info,
            data=memoryview(data),
            starts=starts,
            sizes=sizes,
            shows=records["frame"].astype(np.int64),
            keys=(records["flags"] & PacketFlag.KEY) != 0,
            key=self.path.stem,
            shard="made",
        )

    @cached_property
    def framemd5(self) -> list[str]:
        """MD5 of every frame's planes by ffmpeg's decoder: a reference independent of fastvid."""
        return framemd5(self.path)

    @cached_property
    def planes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every frame by ffmpeg's decoder: Y [N, H, W], U and V [N, H/2, W/2]; 4:2:0 only."""
        command = [ffmpeg(), "-v", "error", "-i", str(self.path), "-fps_mode", "passthrough", "-f", "rawvideo", "-"]
        raw = np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout, np.uint8)
        height, width = self.info.height, self.info.width
        frames = raw.reshape(self.info.num_frames, height * width * 3 // 2)
        luma, chroma = height * width, height * width // 4
        half = (-1, height // 2, width // 2)
        return (
            frames[:, :luma].reshape(-1, height, width),
            frames[:, luma : luma + chroma].reshape(half),
            frames[:, luma + chroma :].reshape(half),
        )


class Videos:
    """Makes each video once and caches it in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Video] = {}

    def painted(self, encoding: str, *, frames: int = 70, size: tuple[int, int] = (96, 160)) -> Video:
        """Return painted frame numbers over a moving texture; size: multiples of 16, width at least 160."""
        return self._make(f"painted-{encoding}-{frames}-{size[0]}x{size[1]}", encoding, paint(frames, size))

    def textured(self, encoding: str, *, frames: int = 70, size: tuple[int, int] = (96, 160)) -> Video:
        """Return a moving texture with strong colours and no numbers."""
        return self._make(f"textured-{encoding}-{frames}-{size[0]}x{size[1]}", encoding, texture(frames, size))

    def lines(self, encoding: str, *, size: tuple[int, int] = (96, 160)) -> Video:
        """Return a checkerboard of single black and white pixels."""
        y = np.full((2, *size), WHITE, np.uint8)
        y[:, ::2, ::2] = y[:, 1::2, 1::2] = BLACK
        grey = np.full((2, size[0] // 2, size[1] // 2), 128, np.uint8)
        return self._make(f"lines-{encoding}-{size[0]}x{size[1]}", encoding, (y, grey, grey))

    def _make(self, name: str, encoding: str, planes: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Video:
        if name not in self._made:
            path = self.folder / f"{name}.mp4"
            if "libsvtav1" in arguments(encoding) and not _encodes("libsvtav1"):
                pytest.skip("ffmpeg is built without libsvtav1")
            encode(path, planes, arguments(encoding))
            self._made[name] = Video(path)
        return self._made[name]


def ffmpeg() -> str:
    """Return the path of the ffmpeg program."""
    return find_ffmpeg().path


@cache
def _encodes(encoder: str) -> bool:
    listed = subprocess.run([ffmpeg(), "-hide_banner", "-encoders"], capture_output=True, text=True, check=True)
    return f" {encoder} " in listed.stdout


def packets_of(video: Any) -> list[memoryview]:
    """Return the packets of a made video, in decode order."""
    view = memoryview(video.data)
    places = zip(video.records["offset"].tolist(), video.records["size"].tolist(), strict=True)
    return [view[offset : offset + size] for offset, size in places]


def opened(file: Any) -> Any:
    """Open a file by PyAV; before version 19 it accepts arbitrary bytes in tags only on request."""
    try:
        return av.open(file, metadata_errors="replace")
    except TypeError:
        return av.open(file)


def framemd5(path: Path) -> list[str]:
    """Return the MD5 of every frame's planes, in display order, by ffmpeg's decoder."""
    command = [ffmpeg(), "-v", "error", "-i", str(path), "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "framemd5"]
    lines = subprocess.run([*command, "-"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split(",")[-1].strip() for line in lines if not line.startswith("#")]


def encode(path: Path, planes: tuple[np.ndarray, np.ndarray, np.ndarray], arguments: list[str]) -> None:
    """Encode planes Y [N, H, W], U and V [N, H/2, W/2]."""
    y, u, v = planes
    raw = b"".join(frame.tobytes() for triple in zip(y, u, v, strict=True) for frame in triple)
    source = ["-f", "rawvideo", "-pix_fmt", "yuv420p", "-s", f"{y.shape[2]}x{y.shape[1]}", "-r", "25", "-i", "-"]
    command = [ffmpeg(), "-v", "error", *source, *arguments, "-fps_mode", "passthrough", "-y", str(path)]
    subprocess.run(command, input=raw, check=True)


def texture(frames: int, size: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blobs of colour that drift by three pixels per frame and brighten, so that all frames differ."""
    height, width = size
    rng = np.random.default_rng(seed)
    planes = []
    for scale, low, high in ((1, 40, 200), (2, 70, 190), (2, 70, 190)):
        field = _blobs(rng, height // scale, width // scale)
        drifted = np.stack([np.roll(field, (-t // scale, 3 * t // scale), (0, 1)) for t in range(frames)])
        swing = np.linspace(-10, 10, frames)[:, None, None]
        planes.append(np.clip(low + (high - low) * drifted + swing, 0, 255).round().astype(np.uint8))
    return planes[0], planes[1], planes[2]


def paint(frames: int, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the texture with the frame number painted along the top, most significant bit first."""
    y, u, v = texture(frames, size)
    block = size[1] // BITS // 2 * 2
    for number in range(frames):
        for bit in range(BITS):
            level = WHITE if number >> (BITS - 1 - bit) & 1 else BLACK
            y[number, :block, bit * block : (bit + 1) * block] = level
    u[:, : block // 2], v[:, : block // 2] = 128, 128
    return y, u, v


def read_numbers(pictures: np.ndarray) -> list[int]:
    """Return the numbers painted on frames [T, H, W] of full width, given as luma or one of R, G and B."""
    width = pictures.shape[2]
    block = width // BITS // 2 * 2
    inner = slice(block // 4, block - block // 4)
    numbers = []
    for picture in pictures:
        number = 0
        for bit in range(BITS):
            number = number << 1 | int(picture[inner, bit * block : (bit + 1) * block][:, inner].mean() > 127)
        numbers.append(number)
    return numbers


def _blobs(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return periodic smooth noise in [0, 1], [height, width]."""
    spectrum = np.fft.rfft2(rng.standard_normal((height, width)))
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    field = np.fft.irfft2(spectrum * np.exp(-((rows**2 + columns**2) * 300)), (height, width))
    return (field - field.min()) / (field.max() - field.min())


def spread(path: Path, target: Path, gap: int) -> Path:
    """Write an MP4 with a sparse hole before its packets, so that they are more than `gap` bytes into the file."""
    data = path.read_bytes()
    boxes, at = {}, 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        boxes[data[at + 4 : at + 8]] = (at, size)
        at += size
    (moov, moov_size), (mdat, mdat_size) = boxes[b"moov"], boxes[b"mdat"]
    tables = bytearray(data[moov : moov + moov_size])
    stco = tables.find(b"stco") - 4
    count = int.from_bytes(tables[stco + 12 : stco + 16], "big")
    offsets = np.frombuffer(bytes(tables[stco + 16 : stco + 16 + 4 * count]), ">u4").astype(">u8")
    # The file: ftyp, moov with 64-bit offsets, a box of `gap` bytes, mdat.
    head = data[: boxes[b"ftyp"][1]]
    start = len(head) + moov_size + 4 * count + gap
    co64 = (16 + 8 * count).to_bytes(4, "big") + b"co64" + bytes(4) + count.to_bytes(4, "big")
    co64 += (offsets - mdat + start).astype(">u8").tobytes()
    tables[stco : stco + 16 + 4 * count] = co64
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        place = tables.find(name) - 4
        grown = int.from_bytes(tables[place : place + 4], "big") + 4 * count
        tables[place : place + 4] = grown.to_bytes(4, "big")
    with target.open("wb") as file:
        file.write(head + bytes(tables))
        file.write((1).to_bytes(4, "big") + b"free" + gap.to_bytes(8, "big"))
        file.seek(start)
        file.write(data[mdat : mdat + mdat_size])
    return path
