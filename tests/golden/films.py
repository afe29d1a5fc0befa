"""Write H.264 in MP4 bit by bit, without an encoder, so that the files are the same on every machine."""

import random
import struct

MB = 16
# Number of levels of grey films, spaced so widely that rounding of colour converters does not matter. In RGB they are
# multiples of 24 * 255 / 219.
GREYS, GREY_STEP = 10, 24
GREY_LEVELS = GREY_STEP * 255 / 219

# Main profile, because "constrained baseline" forbids reordered frames.
_PROFILE, _LEVEL = 77, 30
_IDR, _SLICE, _SPS, _PPS = 5, 1, 7, 8
# mb_type of I_PCM and of Intra_16x16 with DC prediction and no coefficients (tables 7-11 and 7-13).
_PCM, _DC, _INTRA_IN_P = 25, 3, 5
_TICKS = 512  # per frame


class _Bits:
    def __init__(self):
        self._bits = []

    def put(self, count, value):
        self._bits.append(f"{value:0{count}b}" if count else "")

    def ue(self, *values):
        """Append unsigned Exp-Golomb codes (9.1)."""
        for value in values:
            code = f"{value + 1:b}"
            self._bits.append("0" * (len(code) - 1) + code)

    def raw(self, data):
        """Append bytes, aligned to the next byte."""
        self._align()
        self._bits.append("".join(f"{byte:08b}" for byte in data))

    def _align(self):
        self._bits = ["".join(self._bits)]
        self._bits.append("0" * (-len(self._bits[0]) % 8))

    def end(self):
        """Return the bytes with the stop bit and emulation prevention bytes (7.4.1)."""
        self.put(1, 1)
        self._align()
        text = "".join(self._bits)
        out, zeros = bytearray(), 0
        for byte in int(text, 2).to_bytes(len(text) // 8, "big"):
            if zeros == 2 and byte <= 3:
                out.append(3)
                zeros = 0
            out.append(byte)
            zeros = zeros + 1 if byte == 0 else 0
        return bytes(out)


def film(frames, width, height, *, seed=0, key_every=12, kind="moving"):
    """Return an H.264 video in MP4."""
    columns, rows = width // MB, height // MB
    draw = random.Random(f"{seed} {width} {height}")
    packets = []  # display place, NAL unit
    for first in range(0, frames, key_every):
        reference = 0
        for place in _decode_order(min(key_every, frames - first)):
            key, kept = place == 0, place % 2 == 0 or place == min(key_every, frames - first) - 1
            shown = _painted(draw, columns * rows, kind, key=key)
            head = _slice_head(key=key, kept=kept, number=reference, place=place, idr=first // key_every)
            packets.append((first + place, (_intra if key else _inter)(head, shown, columns, rows)))
            reference = (reference + kept) % 16
    return _mp4(packets, width, height)


def _decode_order(count):
    order = [0]
    for place in range(2, count, 2):
        order += [place, place - 1]
    return order + ([count - 1] if count % 2 == 0 else [])


def _painted(draw, blocks, kind, *, key):
    """Return the samples of a frame's raw macroblocks, none of them zero."""
    if kind == "grey":
        return {block: _grey(draw) for block in (range(blocks) if key else sorted(draw.sample(range(blocks), 2)))}
    count = max(1, blocks // 4) if key and kind == "moving" else int(key or kind == "moving")
    return {block: _ramp(draw) for block in sorted(draw.sample(range(blocks), count))}


def _grey(draw):
    lumas = [16 + GREY_STEP * draw.randrange(GREYS) for _ in range(MB)]
    return bytes(lumas[(x // 4 + y // 4 * 4) % MB] for y in range(MB) for x in range(MB)) + bytes([128]) * 128


def _ramp(draw):
    """Return a luma ramp and two constant chroma planes."""
    base, step, u, v = draw.randrange(40, 120), draw.randrange(1, 5), draw.randrange(90, 166), draw.randrange(90, 166)
    luma = bytes(base + step * ((x + 2 * y) % 24) for y in range(MB) for x in range(MB))
    return luma + bytes([u]) * 64 + bytes([v]) * 64


def _slice_head(*, key, kept, number, place, idr):
    bits = _Bits()
    bits.put(8, (3 if kept else 0) << 5 | (_IDR if key else _SLICE))
    bits.ue(0, 7 if key else 5, 0)  # first macroblock, all slices I or P, parameter set
    bits.put(4, number)
    if key:
        bits.ue(idr % 2)
    bits.put(8, 2 * place)  # order of display
    if not key:
        bits.put(2, 0)  # the usual references
    if kept:
        bits.put(2 if key else 1, 0)
    bits.ue(0, 1)  # no change of the quantiser, no deblocking
    return bits


def _intra(bits, painted, columns, rows):
    for block in range(columns * rows):
        if block in painted:
            bits.ue(_PCM)
            bits.raw(painted[block])
            continue
        bits.ue(_DC, 0, 0)  # DC of chroma too, no change of the quantiser
        # The code for "no coefficients" depends on the neighbours' coefficients (9.2.1): raw macroblocks count as 16.
        beside = [16 * (block - 1 in painted)] if block % columns else []
        above = [16 * (block - columns in painted)] if block >= columns else []
        both = beside + above
        level = (sum(both) + len(both) - 1) // len(both) if both else 0
        bits.put(*((1, 1) if level < 2 else (6, 3)))
    return bits.end()


def _inter(bits, painted, columns, rows):
    last = -1
    for block in sorted(painted):
        bits.ue(block - last - 1, _INTRA_IN_P + _PCM)
        bits.raw(painted[block])
        last = block
    if last < columns * rows - 1:
        bits.ue(columns * rows - 1 - last)
    return bits.end()


def _parameters(width, height):
    sps = _Bits()
    for byte in (3 << 5 | _SPS, _PROFILE, 0, _LEVEL):
        sps.put(8, byte)
    sps.ue(0, 0, 0, 4, 1)  # set, 4 bits of frame number, 8 bits of display order, one reference
    sps.put(1, 0)
    sps.ue(width // MB - 1, height // MB - 1)
    sps.put(4, 0b1101)  # frames only, direct 8x8, no cropping, VUI follows
    sps.put(3, 0b001)  # no aspect, no overscan, a video signal:
    sps.put(3, 5)
    sps.put(2, 0b01)  # limited range, colours follow
    for _ in range(3):
        sps.put(8, 6)  # BT.601
    sps.put(5, 0)  # no chroma place, no timing, no HRD twice, no picture structure
    sps.put(2, 0b11)  # restrictions: vectors may leave the picture
    sps.ue(0, 0, 10, 10, 1, 2)  # one frame out of order, two kept
    return sps.end(), _picture_parameters()


def _picture_parameters():
    pps = _Bits()
    pps.put(8, 3 << 5 | _PPS)
    pps.ue(0, 0)
    pps.put(2, 0)
    pps.ue(0, 0, 0)
    pps.put(3, 0)
    pps.ue(0, 0, 0)
    pps.put(3, 0b100)  # slices say how they deblock
    return pps.end()


def _box(name, *parts):
    return struct.pack(">I", 8 + sum(map(len, parts))) + name + b"".join(parts)


def _mp4(packets, width, height):
    count, scale = len(packets), 25 * _TICKS
    sps, pps = _parameters(width, height)
    avcc = _box(
        b"avcC",
        bytes([1, *sps[1:4], 0xFF, 0xE1]) + struct.pack(">H", len(sps)) + sps,
        b"\1" + struct.pack(">H", len(pps)) + pps,
    )
    colr = _box(b"colr", b"nclx", struct.pack(">3HB", 6, 6, 6, 0))
    entry = struct.pack(">6xH16xHHII4xH32xHh", 1, width, height, 72 << 16, 72 << 16, 1, 24, -1)
    # An edit list removes the delay of one frame between decode and display order.
    delay = 1 if count > 1 else 0
    shown_at = [place + delay - number for number, (place, _) in enumerate(packets)]
    keys = [number + 1 for number, (_, data) in enumerate(packets) if data[0] & 31 == _IDR]
    sizes = [4 + len(data) for _, data in packets]
    matrix = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)

    def table(name, rows, *before):
        flat = [value for row in rows for value in row]
        return _box(name, struct.pack(f">{2 + len(before) + len(flat)}I", 0, *before, len(rows), *flat))

    def moov(offset):
        stbl = _box(
            b"stbl",
            _box(b"stsd", struct.pack(">II", 0, 1), _box(b"avc1", entry, avcc, colr)),
            table(b"stts", [(count, _TICKS)]),
            table(b"ctts", [(1, _TICKS * steps) for steps in shown_at]),
            table(b"stss", [(key,) for key in keys]),
            table(b"stsc", [(1, count, 1)]),
            table(b"stsz", [(size,) for size in sizes], 0),
            table(b"stco", [(offset,)]),
        )
        dref = _box(b"dref", struct.pack(">II", 0, 1), _box(b"url ", struct.pack(">I", 1)))
        minf = _box(b"minf", _box(b"vmhd", struct.pack(">IQ", 1, 0)), _box(b"dinf", dref), stbl)
        mdhd = _box(b"mdhd", struct.pack(">5IHH", 0, 0, 0, scale, count * _TICKS, 0x55C4, 0))
        hdlr = _box(b"hdlr", struct.pack(">II4s12x", 0, 0, b"vide"), b"\0")
        elst = _box(b"elst", struct.pack(">IIIiI", 0, 1, count * _TICKS, delay * _TICKS, 1 << 16))
        tkhd = struct.pack(">6I8xHHHH", 3, 0, 0, 1, 0, count * _TICKS, 0, 0, 0, 0) + matrix
        trak = _box(
            b"trak",
            _box(b"tkhd", tkhd, struct.pack(">II", width << 16, height << 16)),
            _box(b"edts", elst),
            _box(b"mdia", mdhd, hdlr, minf),
        )
        mvhd = struct.pack(">5IIH10x", 0, 0, 0, scale, count * _TICKS, 1 << 16, 1 << 8) + matrix
        return _box(b"moov", _box(b"mvhd", mvhd, bytes(24), struct.pack(">I", 2)), trak)

    ftyp = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isomavc1")
    start = len(ftyp) + len(moov(0)) + 8
    body = b"".join(struct.pack(">I", len(data)) + data for _, data in packets)
    return ftyp + moov(start) + _box(b"mdat", body)
