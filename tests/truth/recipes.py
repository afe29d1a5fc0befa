"""Painted files of every kind, and what each way must make of them: equal to a player, or refused for a named reason.

A recipe is a name, ffmpeg's arguments, perhaps an edit of the bytes, and the expectation. Nothing here asks fastvid.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np

from tests.makers import ffmpeg

HEIGHT, WIDTH = 128, 192
FRAMES = 24
RATE = "25"
BITS = 6
DARK, BRIGHT = 40, 210
# What blocks occupy of a picture, as parts of its sides; a frame around them can be cut off.
TOP, LEFT, ROWS, COLUMNS = 0.2, 0.15, 0.6, 0.7

PLACE = ("none", "sample", "all")
PACKETS = (*PLACE, "copy")
ENCODED = ("compact", "intra")
WAYS = (*PACKETS, *ENCODED)
Verdict = str
"""`equal`, perhaps with a note that the ledger must have, or the reason of a refusal, or `error` for a file that is
packed and raises one whenever it is read; several with ` or ` between."""

MATRICES = {
    "rot90": (0, 1, -1, 0),
    "rot180": (-1, 0, 0, -1),
    "rot270": (0, -1, 1, 0),
    "hflip": (-1, 0, 0, 1),
    "vflip": (1, 0, 0, -1),
    "transpose": (0, 1, 1, 0),
    "rot45": (0.7071, 0.7071, -0.7071, 0.7071),
}
X264 = "-c:v libx264 -preset veryfast -threads 1 -crf 14 -x264-params keyint=12:min-keyint=12:scenecut=0"
X265 = "-c:v libx265 -preset ultrafast -crf 14 -x265-params log-level=none:pools=1:keyint=12:min-keyint=12:scenecut=0"
CODECS = {
    "h264": f"-pix_fmt yuv420p {X264}:bframes=2",
    "hevc": f"-pix_fmt yuv420p {X265}:bframes=2 -tag:v hvc1",
    "vp9": "-pix_fmt yuv420p -c:v libvpx-vp9 -g 12 -b:v 0 -crf 16 -cpu-used 8 -threads 1",
    "vp8": "-pix_fmt yuv420p -c:v libvpx -g 12 -b:v 2M -crf 6 -cpu-used 8 -threads 1",
    "av1": "-pix_fmt yuv420p -c:v libaom-av1 -usage realtime -cpu-used 8 -g 12 -crf 16 -threads 1",
    "mpeg4": "-pix_fmt yuv420p -c:v mpeg4 -q:v 2 -g 12 -bf 2 -threads 1",
    "mpeg4p": "-pix_fmt yuv420p -c:v mpeg4 -q:v 2 -g 12 -threads 1",
    "mjpeg": "-pix_fmt yuvj420p -c:v mjpeg -q:v 2 -threads 1",
    "mpeg2": "-pix_fmt yuv420p -c:v mpeg2video -q:v 2 -g 12 -bf 2 -threads 1",
    "mpeg1": "-pix_fmt yuv420p -c:v mpeg1video -q:v 2 -g 12 -bf 2 -threads 1",
    "ffv1": "-pix_fmt yuv420p -c:v ffv1",
    "prores": "-c:v prores_ks -profile:v 0",
    "png": "-c:v png",
    "flv1": "-pix_fmt yuv420p -c:v flv1 -q:v 2 -g 12",
    "wmv2": "-pix_fmt yuv420p -c:v wmv2 -q:v 2 -g 12",
    "msmpeg4": "-pix_fmt yuv420p -c:v msmpeg4 -q:v 2 -g 12",
    "theora": "-pix_fmt yuv420p -c:v libtheora -q:v 9 -g 12",
}
# What cannot be used where it is, whatever is in it: the codec by name, or the container.
FOREIGN = ("mpeg2", "mpeg1", "ffv1", "prores", "png", "flv1", "wmv2", "msmpeg4", "theora")
CONTAINERS = {
    "mp4": "h264 hevc vp9 av1 mpeg4 mpeg4p mjpeg mpeg2",
    "mov": "h264 hevc mpeg4 mjpeg mpeg2 prores png",
    "mkv": "h264 hevc vp8 vp9 av1 mpeg4 mjpeg mpeg2 mpeg1 ffv1 theora",
    "webm": "vp8 vp9 av1",
    "avi": "h264 mpeg4 mpeg4p mjpeg mpeg2 msmpeg4 ffv1",
    "ts": "h264 hevc mpeg2 mpeg4",
    "m2ts": "h264 mpeg2",
    "frag.mp4": "h264 hevc vp9 av1 mpeg4",
    "cmaf.mp4": "h264 hevc",
    "flv": "h264 flv1",
    "mpg": "mpeg2 mpeg1",
    "wmv": "wmv2",
    "ogv": "theora",
    "ivf": "vp8 vp9 av1",
    "3gp": "h264 mpeg4",
    "mxf": "mpeg2",
    "h264": "h264",
    "hevc": "hevc",
}
_MUXER = {
    "frag.mp4": "-f mp4 -movflags frag_keyframe+empty_moov",
    "cmaf.mp4": "-f mp4 -movflags cmaf+frag_keyframe+empty_moov+delay_moov",
    "m2ts": "-f mpegts -mpegts_m2ts_mode 1",
}


@dataclass(frozen=True)
class Recipe:
    """How to make a file, and what is expected of it."""

    name: str
    suffix: str
    encode: str  # ffmpeg's arguments for the encoder
    filters: str = "null"
    size: tuple[int, int] = (HEIGHT, WIDTH)
    frames: int = FRAMES
    rate: str = RATE
    output: str = ""  # ffmpeg's arguments for the muxer
    more: tuple[str, ...] = ()  # further ffmpeg runs, with {} for the file before
    paint: Callable[[], bytes] | None = None  # makes the stream instead of an encoder
    once: bool = (
        False  # whether the stream keeps only its first parameter sets, as in a file without any in its packets
    )
    join: str = ""  # arguments of a second encode, whose stream follows the first
    edit: Callable[[bytes], bytes] | None = None
    sound: str = ""  # arguments of a sound encoder
    crop: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right that the container cuts off
    turned: str = ""  # filters by which the player turns what a crop leaves
    aspect: str = "1"  # width of a pixel over its height, of what is coded
    player: str = "null"  # filters of the player, such as those that deinterlace
    numbers: tuple[int, ...] | None = None  # of the shown frames; None if only the player knows
    # `numbers`: only painted numbers are compared; `counted`: no times are, because the file's are damaged
    pictures: str = "equal"
    expected: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The file's name."""
        suffix = self.more[-1].split()[-1] if self.more else self.suffix.rpartition(".")[2]
        return f"{self.name}.{suffix}"

    def verdict(self, way: str) -> Verdict:
        """Return what must come of a way, of itself or of the ways that it is one of."""
        groups = [way, "place" if way in PLACE else "", "packets" if way in PACKETS else "encoded", "any"]
        return next((self.expected[name] for name in groups if name in self.expected), "equal")

    def but(self, name: str, **changes: object) -> Recipe:
        """Return a variant with a longer name."""
        expected = MappingProxyType(dict(self.expected) | dict(changes.pop("expected", {})))  # type: ignore[call-overload]
        return replace(self, name=f"{self.name}-{name}".rstrip("-"), expected=expected, **changes)  # type: ignore[arg-type]


def paint(frames: int, size: tuple[int, int]) -> np.ndarray:
    """Return frames with their numbers in blocks and below them in the complement, uint8 [N, H, W, 3]."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width] / [[[height]], [[width]]]
    bits = np.clip(((x - LEFT) / COLUMNS * BITS).astype(int), 0, BITS - 1)
    inside = (x >= LEFT) & (x < LEFT + COLUMNS) & (y >= TOP) & (y < TOP + ROWS)
    lower = y >= TOP + ROWS / 2
    pictures = np.empty((frames, height, width, 3), np.uint8)
    for number in range(frames):
        drift = 60 * number / FRAMES
        ground = np.stack([60 + 120 * x, 60 + 120 * y, 150 - 40 * x - 40 * y + drift], axis=-1)
        bright = ((number >> (BITS - 1 - bits)) & 1) ^ lower
        blocks = np.where(bright, BRIGHT, DARK)[..., None]
        pictures[number] = np.where(inside[..., None], blocks, ground).round().clip(0, 255).astype(np.uint8)
    return pictures


def read_number(picture: np.ndarray) -> int | None:
    """Return the number on an upright picture that nothing was cut from, [H, W, 3]; None if its two rows disagree."""
    height, width = picture.shape[:2]
    found = []
    for row in (0.25, 0.75):
        at = int(height * (TOP + ROWS * row))
        number = 0
        for bit in range(BITS):
            middle = int(width * (LEFT + COLUMNS * (bit + 0.5) / BITS))
            number = number << 1 | int(picture[at - 3 : at + 4, middle - 3 : middle + 4].mean() > 125)
        found.append(number)
    return found[0] if found[0] == (1 << BITS) - 1 - found[1] else None


def run(*arguments: str, data: bytes | None = None) -> bytes:
    """Run ffmpeg quietly."""
    command = [ffmpeg(), "-v", "error", "-y", *arguments]
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


@cache
def raw(frames: int, size: tuple[int, int]) -> bytes:
    """Return painted frames as ffmpeg reads them."""
    return paint(frames, size).tobytes()


def make(recipe: Recipe, folder: Path, work: Path) -> Path:
    """Write a recipe's file."""
    target = folder / recipe.file
    path = work / f"{recipe.name}-0.{recipe.suffix.rpartition('.')[2]}"
    if recipe.paint is not None:
        path.write_bytes(recipe.paint())
    else:
        _encode(recipe, recipe.encode, path)
    if recipe.once:
        path.write_bytes(once(path.read_bytes()))
    if recipe.join:
        second = work / f"{recipe.name}-second{path.suffix}"
        _encode(recipe, recipe.join, second)
        path.write_bytes(path.read_bytes() + second.read_bytes())
    for step, words in enumerate(recipe.more, 1):
        before, path = path, work / f"{recipe.name}-{step}.{words.split()[-1]}"
        run(*(str(before) if word == "{}" else word for word in words.split()[:-1]), str(path))
    data = path.read_bytes()
    target.write_bytes(data if recipe.edit is None else recipe.edit(data))
    return target


def _encode(recipe: Recipe, encode: str, path: Path) -> None:
    height, width = recipe.size
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {recipe.rate} -i -".split()
    sound = []
    if recipe.sound:
        source += ["-f", "lavfi", "-i", f"aevalsrc='{SOUND}':s=48000:d={recipe.frames / 25}"]
        sound = recipe.sound.split()
    muxer = [*_MUXER.get(recipe.suffix, "").split(), *recipe.output.split()]
    filters = ["-vf", recipe.filters, "-fps_mode", "passthrough"]
    data = raw(recipe.frames, recipe.size)
    run(*source, *filters, *encode.split(), *sound, "-map_metadata", "-1", *muxer, str(path), data=data)


SOUND = "0.4*sin(2*PI*t*(300+600*t))"


# --- edits of bytes -------------------------------------------------------------------------------------------------


def matrix(name: str, data: bytes) -> bytes:
    """Give an MP4's first track a display matrix."""
    a, b, c, d = (round(value * 65536) for value in MATRICES[name])
    edited = bytearray(data)
    at = data.index(b"tkhd") + 4
    at += 40 if data[at] == 0 else 52
    # Players move the picture back; the translation is not looked at.
    struct.pack_into(">9i", edited, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(edited)


def edits(*segments: tuple[float, float], data: bytes) -> bytes:
    """Give an MP4's first track an edit list: the first frame of each segment, -1 for an empty one, and its length."""
    trak = data.index(b"trak")
    movie = struct.unpack(">I", data[(at := data.index(b"mvhd")) + 16 : at + 20])[0]
    scale = struct.unpack(">I", data[(at := data.index(b"mdhd")) + 16 : at + 20])[0]
    elst = data.find(b"elst", trak)
    (start,) = struct.unpack_from(">i", data, elst + 16) if elst > 0 else (0,)
    body = struct.pack(">4sII", b"elst", 0, len(segments))
    for first, length in segments:
        begin = -1 if first < 0 else start + round(first * scale / 25)
        body += struct.pack(">IiI", round(length * movie / 25), begin, 1 << 16)
    box = struct.pack(">I", len(body) + 4) + body
    box = struct.pack(">I4s", len(box) + 8, b"edts") + box
    old = data.index(b"edts", trak) - 4
    size = struct.unpack_from(">I", data, old)[0]
    return replaced(data, old, size, box, (b"moov", b"trak"))


def displayed(width: int, height: int, data: bytes) -> bytes:
    """Give an MP4's first track header a size."""
    edited = bytearray(data)
    at = data.index(b"tkhd") + 4
    struct.pack_into(">II", edited, at + (76 if data[at] == 0 else 88), width << 16, height << 16)
    return bytes(edited)


def clap(width: int, height: int, data: bytes, right: int = 0, down: int = 0) -> bytes:
    """Give an MP4's first track a clean aperture of so many pixels, this far from the middle."""
    box = struct.pack(">I4s4IiIiI", 40, b"clap", width, 1, height, 1, right, 1, down, 1)
    stsd = data.index(b"stsd")
    entry = stsd + 12
    end = entry + struct.unpack_from(">I", data, entry)[0]
    names = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd")
    return replaced(data, end, 0, box, names, (entry,))


def replaced(
    data: bytes, at: int, size: int, new: bytes, parents: tuple[bytes, ...], places: tuple[int, ...] = ()
) -> bytes:
    """Return an MP4 whose tables are behind its packets with some bytes of them replaced."""
    edited, start = bytearray(data), data.rindex(b"moov") - 4
    assert start > data.index(b"mdat")
    grown, place = len(new) - size, start
    for name in parents:
        place = data.index(name, place)
        struct.pack_into(">I", edited, place - 4, struct.unpack_from(">I", data, place - 4)[0] + grown)
    for place in places:
        struct.pack_into(">I", edited, place, struct.unpack_from(">I", data, place)[0] + grown)
    edited[at : at + size] = new
    return bytes(edited)


def pixel_crop(margins: tuple[int, int, int, int], data: bytes) -> bytes:
    """Give the video of a Matroska file without an index margins that are cut off: top, left, bottom, right."""
    new = b"".join(
        struct.pack(">HBB", kind, 0x81, margin)
        for kind, margin in zip((0x54BB, 0x54CC, 0x54AA, 0x54DD), margins, strict=True)
    )
    edited, place = bytearray(data), data.rindex(b"\x16\x54\xae\x6b", 0, data.index(b"\x1f\x43\xb6\x75"))
    for wanted in (b"\x16\x54\xae\x6b", b"\xae", b"\xe0"):
        while True:
            width = 9 - data[place].bit_length()
            kind, length = data[place : place + width], 9 - data[place + width].bit_length()
            size = int.from_bytes(data[place + width : place + width + length], "big")
            if kind == wanted:
                break
            place += width + length + (size & ((1 << 7 * length) - 1))
        edited[place + width : place + width + length] = (size + len(new)).to_bytes(length, "big")
        place += width + length
    edited[place:place] = new
    # The list of places, which no longer fits, becomes an empty space.
    if (at := data.find(b"\x11\x4d\x9b\x74")) > 0:
        length = 9 - data[at + 4].bit_length()
        size = int.from_bytes(data[at + 4 : at + 4 + length], "big") & ((1 << 7 * length) - 1)
        edited[at : at + 9] = b"\xec" + (4 + length + size - 9 | 1 << 56).to_bytes(8, "big")
    return bytes(edited)


def once(data: bytes) -> bytes:
    """Return a raw H.264 or HEVC stream without the parameter sets that repeat its first ones."""
    seen, kept = set[bytes](), bytearray()
    for unit in re.split(rb"\x00\x00\x00?\x01", data)[1:]:
        is_set = unit[0] & 31 in (7, 8) or unit[0] >> 1 in (32, 33, 34)
        if not is_set or unit not in seen:
            kept += b"\0\0\0\1" + unit
        seen.add(unit)
    return bytes(kept)


def cut_off(part: float, data: bytes) -> bytes:
    """Return the beginning of a file."""
    return data[: int(part * len(data))]


def spoiled(data: bytes) -> bytes:
    """Return a file with noise in the middle of its packets."""
    edited, at = bytearray(data), len(data) * 2 // 5
    noise = np.random.default_rng(1).integers(0, 256, len(data) // 10, np.uint8).tobytes()
    edited[at : at + len(noise)] = noise
    return bytes(edited)


def zeroed(data: bytes) -> bytes:
    """Return a file of which a download left the second half empty, but for the tables of an MP4."""
    end = data.rindex(b"moov") - 4 if b"moov" in data else len(data)
    half = end // 2
    return data[:half] + bytes(end - half) + data[end:]
