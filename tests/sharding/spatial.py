"""Makes a spatial video as phones record it: MV-HEVC (H.265 annexes F and G), a base view and a second one, in an MP4.

No encoder here writes two views. So a stream of one view gets a video parameter set of two, and every picture is
followed by a second one that carries the other view's number. A decoder that shows the base view skips those; FFmpeg's
marks its frames with the number of their view.
"""

import re
import subprocess
from fractions import Fraction
from pathlib import Path

import av

from fastvid.media.ffmpeg import find_ffmpeg

_START = b"\0\0\0\1"
_VPS, _FIRST_NOT_PICTURE = 32, 32  # nal_unit_type, H.265 table 7-1
_RATE = 25


def spatial_video(path: Path, *, frames: int = 40, size: tuple[int, int] = (320, 192)) -> Path:
    """A test pattern of 25 frames a second; `size` is width and height, multiples of 16."""
    params = "log-level=none:pools=1:info=0:keyint=16:bframes=0"
    pattern = f"testsrc2=size={size[0]}x{size[1]}:rate={_RATE}"
    command = [find_ffmpeg().path, "-v", "error", "-f", "lavfi", "-i", pattern]
    command += ["-frames:v", str(frames), "-pix_fmt", "yuv420p", "-c:v", "libx265", "-x265-params", params]
    plain = subprocess.run([*command, "-f", "hevc", "-"], check=True, capture_output=True).stdout
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.with_suffix(".hevc")
    stream.write_bytes(b"".join(_two_views(plain, size)))
    with av.open(str(stream), format="hevc") as source, av.open(str(path), "w", format="mp4") as target:
        track = target.add_stream_from_template(source.streams.video[0], opaque=True)
        track.time_base = Fraction(1, 90_000)
        for number, packet in enumerate(p for p in source.demux(video=0) if p.size):
            packet.stream, packet.time_base = track, Fraction(1, _RATE)
            packet.pts = packet.dts = number
            packet.duration = 1
            target.mux(packet)
    stream.unlink()
    return path


def _two_views(stream: bytes, size: tuple[int, int]):
    for unit in re.split(rb"\x00?\x00\x00\x01", stream):
        if not unit:
            continue
        kind = unit[0] >> 1 & 63
        yield _START + (_parameter_set(*size) if kind == _VPS else unit)
        if kind < _FIRST_NOT_PICTURE:
            yield _START + bytes([unit[0], unit[1] | 1 << 3]) + unit[2:]  # nuh_layer_id 1


def _parameter_set(width: int, height: int) -> bytes:
    """A video parameter set with the extension for two views, the second predicted from the first."""
    main = "00000001" + f"{0b011 << 29:032b}" + "1001" + "0" * 43 + "0"  # profile Main: 88 bits
    multiview = "00000110" + f"{1 << 25:032b}" + "1001" + "0" * 43 + "0"
    level = f"{60:08b}"
    bits = "0000110000010001" + "1" * 16  # id 0, base layer is here, 2 layers, 1 sub-layer
    bits += main + level
    bits += "1" + _ue(4) + _ue(2) + _ue(0)  # picture buffer, reordering, latency
    bits += "000001" + _ue(1) + "11" + "0"  # highest layer, 2 layer sets, layers of the second, no timing
    bits += "1"  # an extension follows, aligned by ones (F.7.3.2.1.1)
    bits += "1" * (-len(bits) % 8)
    bits += level  # of the base layer
    bits += "0" + f"{1 << 14:016b}" + "000" + "0" + "1"  # scalability by view, 1 bit; the second layer is view 1
    bits += "000101"  # view ids of one bit: 0, 1
    bits += "1" + "0" + "0" + "1"  # depends on the base, defaults, all reference layers are active
    bits += _ue(2) + "1" + multiview + level  # 3 profiles
    bits += _ue(0) + "00" + "01" + "10"  # output the highest layer of each set; profiles of the layers
    bits += _ue(0) + f"{width:016b}{height:016b}" + "101000000000"  # 4:2:0, 8 bits, no cropping
    bits += "110" + _ue(4) + _ue(4) + _ue(2) + _ue(0)  # one reference layer, aligned order; picture buffers
    bits += _ue(0) + "1" + "10"  # both kinds of prediction between layers
    bits += _ue(0) + "0" + "0"  # nothing else, no VUI, no further extension
    bits += "1"
    bits += "0" * (-len(bits) % 8)
    return b"\x40\x01" + _escaped(int(bits, 2).to_bytes(len(bits) // 8, "big"))


def _ue(value: int) -> str:
    """Exponential Golomb code (9.2)."""
    digits = f"{value + 1:b}"
    return "0" * (len(digits) - 1) + digits


def _escaped(data: bytes) -> bytes:
    """With emulation prevention (7.4.2): no start code inside."""
    out, zeros = bytearray(), 0
    for byte in data:
        if zeros == 2 and byte <= 3:
            out.append(3)
            zeros = 0
        out.append(byte)
        zeros = zeros + 1 if byte == 0 else 0
    return bytes(out)
