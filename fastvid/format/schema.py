"""The on-disk format: version, names, key grammar, columns with their units, and how records and tables are read.

All integers in binary files are little-endian, so that x86-64 and common arm64 systems can map them without a copy.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.errors import FormatError, UsageError, VersionError
from fastvid.runtime.arrays import IntArray
from fastvid.storage import Storage

FORMAT: Final = "fastvid"
FORMAT_VERSION: Final = (2, 0)
DESCRIBED: Final = 1
"""Minor version of a packet sidecar (`.pkt`) whose rows of streams are DESCRIBED_DTYPE."""

DATASET_JSON: Final = "dataset.json"
EXPORT_RECORD: Final = "export.json"  # written last: dataset, generation, and the size and samples of each file
GENERATIONS: Final = "generations"
LEDGER: Final = "ledger.parquet"
LEDGER_PARTS: Final = "ledger-parts"
BLOCKED: Final = "blocked.json"
REMOVALS: Final = "removals"

# A key is the stem of a tar member. webdataset splits a member's name at its first dot, so a key must not contain one.
# ustar stores names of up to 100 bytes without an extension header, and ".flow.mp4" takes nine of them.
KEY_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_/-]*")
MAX_KEY_BYTES: Final = 90

PICTURES: Final = "rgb"
FLOW: Final = "flow"
AUDIO: Final = "audio"
_MEMBER_SUFFIX: Final = {PICTURES: "mp4", FLOW: "flow.mp4", AUDIO: "m4a"}

# The name of a camera, such as "observation.images.top", is part of the name of its member in a tar.
STREAM_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

FOREIGN: Final = "foreign"
"""Name of the profile that a generation records for a shard written by another tool."""

IN_PLACE: Final = "in-place"
"""Name of the profile that a generation records for a shard that lists videos which the dataset does not contain."""

SIGNALS: Final = "signals"
"""Entry of a generation's `extras`: what each signal consists of, by its name; see `fastvid.format.annotations`."""

DEPTH: Final = "depth"
"""Entry of a generation's `extras`: how levels become distances, by stream; see `fastvid.format.planes`."""

LEROBOT: Final = "lerobot"
"""Entry of a generation's `extras` if it was imported from a LeRobot dataset: ``info``, ``tasks``, and statistics."""

# Bytes that FFmpeg may read past a packet's end (AV_INPUT_BUFFER_PADDING_SIZE in libavcodec/defs.h).
INPUT_PADDING: Final = 64


def with_padding(packet: bytes | memoryview) -> memoryview:
    """Return a packet with zeros after its end, because PyAV neither copies nor pads what is made from a buffer."""
    return memoryview(b"".join((packet, bytes(INPUT_PADDING))))[: len(packet)]


SHARD_SUFFIXES: Final = ("tar", "idx", "parquet", "pkt")
"""Suffixes of a shard's files, the tar first."""

IN_PLACE_SUFFIXES: Final = ("files", "parquet", "pkt")
"""Suffixes of the files of a shard of videos in place, the list of their files first."""


class Codec(IntEnum):
    """Video codecs by their number in a `.pkt` file."""

    H264 = 1
    HEVC = 2
    VP9 = 3
    MJPEG = 4
    AV1 = 5
    VP8 = 6
    MPEG4 = 7

    @property
    def label(self) -> str:
        """FFmpeg's name of the codec."""
        return self.name.lower()


class Range(IntEnum):
    """Sample range of luma and chroma, numbered as in FFmpeg (AVColorRange)."""

    UNKNOWN = 0
    LIMITED = 1
    FULL = 2


class Matrix(IntEnum):
    """Luma coefficients, numbered as in ITU-T H.273 table 4 (MatrixCoefficients)."""

    RGB = 0
    BT709 = 1
    UNKNOWN = 2
    FCC = 4
    BT470BG = 5
    SMPTE170M = 6
    SMPTE240M = 7
    BT2020_NCL = 9


def matrix_of(code: int) -> Matrix:
    """Return luma coefficients by their number, UNKNOWN for one that is not a member."""
    return Matrix(code) if code in list(Matrix) else Matrix.UNKNOWN


class PacketFlag(IntFlag):
    """How a packet relates to the packets around it."""

    KEY = 1  # decoding may start here: no later packet in decode order needs an earlier one
    DROPPABLE = 2  # no other packet refers to it
    HIDDEN = 4  # must be decoded but shows no frame of the sample (edit lists, alternate references)


class StreamFlag(IntFlag):
    """Properties of a whole stream."""

    NONE = 0
    CONFORMS = 1  # written by a fastvid profile: constant frame rate, multiple-of-16 sides, 4:2:0, BT.601 limited
    WHOLE = 2  # parts of the stream cannot be decoded safely by themselves: feed every packet from the first
    UNCHECKED = 4  # its packets have no checksums; the version of its file is checked instead (videos in place)
    PART = 8  # the member is a file that contains more than this sample, such as other episodes
    LATE = 16  # indexed without reading the packets' headers: which packets are droppable is found when they are read


# One packet, in decode order. Its offset, of 48 bits, counts from the first byte of the stream's member.
PACKET_DTYPE: Final = np.dtype(
    [
        ("offset", "<u4"),  # bytes, lower 32 bits
        ("size", "<u4"),  # bytes
        ("crc32", "<u4"),  # zlib's CRC-32 (IEEE 802.3) of the packet's bytes: in the standard library, and fast
        ("frame", "<i4"),  # index, in display order, of the frame that it shows; -1 with HIDDEN
        ("flags", "u1"),  # PacketFlag
        ("reserved", "u1"),  # 0
        ("offset_high", "<u2"),  # upper 16 bits of the offset: videos in place may have more than 4 GiB
    ]
)

# One stream of one sample. Rows have a fixed size, so that the offset of row n can be computed.
STREAM_DTYPE: Final = np.dtype(
    [
        ("member_offset", "<u8"),  # bytes from the start of the tar to the member's first data byte
        ("member_size", "<u8"),  # bytes
        ("first_packet", "<u8"),  # row in the packet section
        ("num_packets", "<u4"),
        ("num_frames", "<u4"),  # shown frames
        ("extradata_offset", "<u4"),  # bytes from the start of the extradata section
        ("extradata_size", "<u4"),
        ("fps_num", "<u4"),
        ("fps_den", "<u4"),
        ("width", "<u2"),  # pixels
        ("height", "<u2"),
        ("codec", "u1"),  # Codec
        ("range", "u1"),  # Range
        ("matrix", "u1"),  # Matrix
        ("flags", "u1"),  # StreamFlag
        ("flow_bound", "<f4"),  # optical flow: pixels per frame at the outermost level; 0 for pictures
        ("packets_crc32", "<u4"),  # CRC-32 of the stream's rows in the packet section
    ]
)

# Additional fields of a stream's row in minor version 1, written for streams that fastvid did not encode: how decoded
# pictures become the shown ones (`fastvid.format.presentation`; all 0 if they are the same), and when frames are shown.
DESCRIBED_DTYPE: Final = np.dtype(
    [
        *STREAM_DTYPE.descr,
        ("coded_width", "<u2"),  # of decoded pictures, in pixels
        ("coded_height", "<u2"),
        ("crop_y", "<u2"),  # the part of them that is shown
        ("crop_x", "<u2"),
        ("crop_height", "<u2"),
        ("crop_width", "<u2"),
        ("turn", "u1"),  # quarter turns clockwise
        ("mirror", "u1"),  # whether left and right are exchanged before the turn
        ("reserved", "<u2"),  # 0
        ("times_offset", "<u4"),  # bytes from the start of the extradata section
        ("times_size", "<u4"),  # 0 for a constant rate
    ]
)

# The audio of one sample. The audio section of a `.pkt` has one row per sample, then the CRC-32 of every block.
AUDIO_DTYPE: Final = np.dtype(
    [
        ("member_offset", "<u8"),  # bytes from the start of the tar to the member's first data byte
        ("member_size", "<u8"),  # bytes; 0 for a sample without audio
        ("first_block", "<u8"),  # number of the member's first block in the list of checksums
    ]
)

# Bytes of an audio member that share a checksum; the last block may be shorter. This is one second of AAC at 128
# kbit/s: few unwanted bytes are read with the wanted packets, and 4 bytes of checksum are stored per second.
AUDIO_BLOCK: Final = 1 << 14

PKT_MAGIC: Final = b"FVPK"
PKT_HEADER_DTYPE: Final = np.dtype(
    [
        ("magic", "S4"),
        ("major", "<u2"),
        ("minor", "<u2"),
        ("num_samples", "<u8"),
        ("num_streams", "<u4"),  # video streams per sample, in the order of the generation's
        ("stream_bytes", "<u4"),  # itemsize of STREAM_DTYPE
        ("packet_bytes", "<u4"),  # itemsize of PACKET_DTYPE
        ("extradata_bytes", "<u4"),  # size of the extradata section
        ("num_packets", "<u8"),
        ("tar_sha256", "S32"),  # of the tar, or the list of files, from which the sidecar was computed
        ("audio_bytes", "<u4"),  # size of the audio section; 0 if no sample has audio
        ("index_crc32", "<u4"),  # CRC-32 of the fields above and the stream, extradata and audio sections
    ]
)

FACTS_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("source_id", pa.string(), nullable=False),
        pa.field("source_sha256", pa.string()),
        pa.field("parent", pa.string()),  # source_id of the long video that contains this sample
        pa.field("start_seconds", pa.float64()),  # start of the sample in the parent
        pa.field("end_seconds", pa.float64()),  # end of its last frame in the parent
        pa.field("num_frames", pa.int32(), nullable=False),
        pa.field("fps_num", pa.int32(), nullable=False),
        pa.field("fps_den", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("pix_fmt", pa.string()),
        pa.field("color_range", pa.string(), nullable=False),
        pa.field("color_matrix", pa.string(), nullable=False),
        pa.field("conforms", pa.bool_(), nullable=False),
        pa.field("whole", pa.bool_(), nullable=False),
        pa.field("extradata", pa.binary(), nullable=False),
        pa.field("member", pa.string(), nullable=False),
        pa.field("member_offset", pa.int64(), nullable=False),
        pa.field("member_size", pa.int64(), nullable=False),
        pa.field("first_packet", pa.int64(), nullable=False),
        pa.field("num_packets", pa.int32(), nullable=False),
        pa.field("num_keys", pa.int32(), nullable=False),
        pa.field("num_droppable", pa.int32(), nullable=False),
        pa.field("flow_bound", pa.float64()),  # optical flow only: pixels per frame at the outermost level
        # Audio only. In audio rows num_frames counts samples per channel, and fps is the sample rate.
        pa.field("channels", pa.int32()),
    ]
)

# The annotation columns that fastvid itself reads; other columns of the source are stored unchanged.
ANNOTATION_FIELDS: Final = {
    "key": pa.string(),
    "source_id": pa.string(),
    "label": pa.int32(),  # index into the generation's classes; null when unknown
    "num_frames": pa.int32(),
    "removed": pa.bool_(),
}

# Annotation columns that fastvid computes from a sample's first video stream, for selecting samples.
FACT_FIELDS: Final = {
    "fps": pa.float64(),  # frames per second
    "width": pa.int32(),  # of the stored frames, in pixels
    "height": pa.int32(),
    "duration": pa.float64(),  # seconds
}

CLASS: Final = "class"
"""The name of a sample's class in conditions and in its JSON; it is no column, but made from the label."""
SOURCE_CLASS: Final = f"source_{CLASS}"
"""The column with what a user's table calls the class."""

LEDGER_SCHEMA: Final = pa.schema(
    [
        pa.field("source_id", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # "packed", "rejected", or "removed" with its names
        pa.field("reason", pa.string()),  # a code from fastvid.media.reasons if rejected
        pa.field("message", pa.string()),
        pa.field("key", pa.string()),
        pa.field("shard", pa.string()),
        pa.field("bytes_in", pa.int64()),
        pa.field("bytes_out", pa.int64()),
        pa.field("num_frames", pa.int32()),
        pa.field("seconds", pa.float64()),  # time spent on the source
        pa.field("warnings", pa.list_(pa.string())),
        pa.field("source_sha256", pa.string()),  # of the file's bytes, hex; null if the file was not hashed
        pa.field("source_tag", pa.string()),  # ETag of the file when it was listed; on disks modified-NS
    ]
)


def member_suffix(stream: str) -> str:
    """Return the suffix of a stream's member in a tar, such as ``mp4`` or ``observation.images.top.mp4``."""
    return _MEMBER_SUFFIX.get(stream, f"{stream}.mp4")


def shard_stem(index: int) -> str:
    """Return the name of shard `index` without a suffix, such as ``data-000012``."""
    return f"data-{index:06d}"


def later_stem(stem: str, number: int) -> str:
    """Return a new name for a shard that is written again, such as ``data-000012-7``."""
    return f"{'-'.join(stem.split('-')[:2])}-{number}"


def generation_file(generation: int) -> str:
    """Return the path of a generation's record inside a dataset."""
    return f"{GENERATIONS}/{generation:06d}.json"


def annotations_file(generation: int) -> str:
    """Return the path of a generation's annotations inside a dataset."""
    return f"annotations-{generation:06d}.parquet"


def check_key(key: str) -> str:
    """Return `key` after checking it against the key grammar."""
    if not KEY_PATTERN.fullmatch(key):
        raise UsageError(f"key {key!r} does not match {KEY_PATTERN.pattern}", hint="remove dots and spaces")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise UsageError(f"key {key!r} has {len(key.encode())} bytes, at most {MAX_KEY_BYTES} are allowed")
    return key


# pyarrow's own conversions import pandas first, if it is installed, which takes longer than everything else before the
# first batch. These two do not.
def arrow_integers(values: IntArray) -> pa.Array:
    """Return an Arrow array that shares the memory of `values`, int64 [N]."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def numpy_integers(column: pa.ChunkedArray, *, null: int) -> IntArray:
    """Return a column of integers as int64 [N], with nulls replaced by `null`."""
    import pyarrow.compute as pc  # here, since workers do without it

    filled = pc.coalesce(column.cast(pa.int64()), arrow_integers(np.full(len(column), null, dtype=np.int64)))
    return np.concatenate([np.empty(0, np.int64), *map(np.from_dlpack, filled.chunks)])


def check_version(major: int, minor: int, *, file: str) -> None:
    """Raise VersionError for major versions of the format that this fastvid does not read."""
    if major != FORMAT_VERSION[0]:
        raise VersionError(
            f"format version {major}.{minor} is not {FORMAT_VERSION[0]}.x, which this fastvid reads",
            file=file,
            hint="upgrade fastvid" if major > FORMAT_VERSION[0] else "upgrade the dataset with fastvid 0.2",
        )


def to_parquet(table: pa.Table, *, row_group: int | None = None) -> bytes:
    """Return a table as the bytes of a zstd-compressed Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=row_group)
    data: bytes = sink.getvalue().to_pybytes()
    return data


_SMALL_BYTES, _EXPANSION = 1 << 30, 64
"""A table may unpack to this many bytes, or to this many times the size of its file: real ones reach about 20 times."""


def from_parquet(data: bytes, *, file: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table from the bytes of a Parquet file; FormatError if it unpacks to far more bytes than the file has.

    Arrow's thread pool is not used: a thread that still references a Python object at interpreter exit requests the
    GIL, and the process aborts ("terminate called without an active exception").
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as found:
            missing = [name for name in columns or () if name not in found.schema_arrow.names]
            if missing:
                raise FormatError(f"table has no column {missing[0]!r}", file=file)
            check_unpacked(pa.BufferReader(data), found, columns, name=file)
            return found.read(columns=columns if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"cannot parse the Parquet file: {error}", file=file) from error


def read_facts(storage: Storage, stem: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the facts of a shard, or some of their columns."""
    return from_parquet(storage.read(f"{stem}.parquet"), file=f"{stem}.parquet", columns=columns)


def check_unpacked(
    file: pa.NativeFile, found: pq.ParquetFile, columns: Sequence[str] | None = None, *, name: str | None = None
) -> None:
    """Raise FormatError if columns of a Parquet file would take far more memory than the file has bytes.

    Repeated text is stored once but unpacked into each row, so its unpacked bytes are counted before it is unpacked.
    """
    length = file.size()
    limit = max(_SMALL_BYTES, _EXPANSION * length)
    groups = [found.metadata.row_group(number) for number in range(found.num_row_groups)]
    parts = [group.column(number) for group in groups for number in range(group.num_columns)]
    wanted = None if columns is None else tuple(f"{name}." for name in columns)
    chosen = [part for part in parts if wanted is None or f"{part.path_in_schema}.".startswith(wanted)]
    size = sum(part.total_uncompressed_size for part in chosen)
    texts = [part for part in chosen if part.physical_type == "BYTE_ARRAY" and part.has_dictionary_page]
    if size <= limit < sum(part.total_uncompressed_size * part.num_values for part in texts):
        names = sorted({part.path_in_schema for part in texts})
        with pq.ParquetFile(file, read_dictionary=names, pre_buffer=False) as short:
            some = (rows for name in names for rows in short.iter_batches(columns=[name], use_threads=False))
            size = sum(_unpacked(column) for rows in some for column in rows.columns)
    if size > limit:
        raise FormatError(f"Parquet file of {length:,} bytes unpacks to {size:,}", file=name)


def _unpacked(array: pa.Array) -> int:
    """Return the bytes of an array if repeated text were copied into each row."""
    if pa.types.is_dictionary(array.type):
        import pyarrow.compute as pc  # as above

        return pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(map(_unpacked, array.flatten()))
    return _unpacked(array.flatten()) if pa.types.is_list(array.type) else array.nbytes


_CHECKSUM_AT: Final = PKT_HEADER_DTYPE.fields["index_crc32"][1]  # type: ignore[index]


def index_crc32(index: bytes | memoryview) -> int:
    """Return the CRC-32 of a sidecar's index, all of it except the field of the CRC-32 itself."""
    return zlib.crc32(index[PKT_HEADER_DTYPE.itemsize :], zlib.crc32(index[:_CHECKSUM_AT]))
