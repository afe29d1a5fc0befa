"""Write WebDataset tars deterministically, and find their members."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

from fastvid.errors import FormatError, UsageError
from fastvid.format.schema import check_key
from fastvid.runtime import faults

_BLOCK: Final = tarfile.BLOCKSIZE
_DIGITS: Final = re.compile(rb"[0-7]*")
_LENGTH: Final = re.compile(rb"([0-9]{1,18}) ")  # of a pax record, before it


@dataclass(frozen=True, slots=True)
class TarMember:
    """One file inside a tar, and its position there."""

    name: str  # key, a dot, and suffix
    key: str
    suffix: str
    offset: int  # first byte of its data in the tar
    size: int  # size of its data in bytes


@dataclass(frozen=True, slots=True)
class TarDigest:
    """A tar's size in bytes, SHA-256 in hex, and number of samples, as recorded in a generation."""

    bytes: int
    sha256: str
    samples: int


def write_tar(file: IO[bytes], samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> TarDigest:
    """Write samples, (key, data by suffix), as a plain ustar archive whose bytes depend only on the samples."""
    digest, written, seen = hashlib.sha256(), 0, set()

    def put(data: bytes) -> None:
        nonlocal written
        file.write(data)
        digest.update(data)
        written += len(data)

    for key, members in samples:
        if check_key(key) in seen:
            raise UsageError("duplicate key in one shard", key=key)
        seen.add(key)
        for suffix, data in members.items():
            # Everything except name and size is constant, so the same samples always produce the same bytes.
            info = tarfile.TarInfo(f"{key}.{suffix}")
            info.size, info.mtime, info.mode = len(data), 0, 0o644
            put(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"))
            put(data)
            put(bytes(-len(data) % _BLOCK))
        faults.reach("tar")
    put(bytes(2 * _BLOCK))
    put(bytes(-written % tarfile.RECORDSIZE))
    return TarDigest(written, digest.hexdigest(), len(seen))


def read_members(view: memoryview) -> Iterator[TarMember]:
    """Yield the regular files of a tar, in order; GNU and pax long names are supported."""
    position, long_name = 0, None
    while position + _BLOCK <= len(view):
        header = bytes(view[position : position + _BLOCK])
        if not any(header):
            return
        name, size, kind = _parse_header(header, position)
        data = position + _BLOCK
        if data + size > len(view):
            raise FormatError(f"tar ends inside member {name!r}")
        if kind == b"L":
            long_name = bytes(view[data : data + size]).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == b"x":
            long_name = _pax_path(bytes(view[data : data + size])) or long_name
        elif kind in (b"0", b"\0"):
            path, long_name = long_name or name, None
            key, _, suffix = _split(path)
            if key and not key.endswith("/"):
                yield TarMember(path, key, suffix, data, size)
        else:
            long_name = None
        position = data + size + (-size % _BLOCK)
    raise FormatError("tar has no end-of-archive marker")


def sample_groups(members: Iterable[TarMember]) -> list[tuple[str, list[TarMember]]]:
    """Group members by sample: consecutive members with the same key, as webdataset groups them."""
    groups: list[tuple[str, list[TarMember]]] = []
    for member in members:
        if not groups or groups[-1][0] != member.key:
            groups.append((member.key, []))
        groups[-1][1].append(member)
    return groups


def wds2idx(members: Iterable[TarMember]) -> bytes:
    """Return the index for DALI's webdataset reader, in the format of DALI's ``wds2idx`` (version 1.2)."""
    samples = [group for _, group in sample_groups(members)]
    lines = [f"v1.2 {len(samples)}"]
    lines += [" ".join(f"{one.suffix} {one.offset} {one.size} {one.name}" for one in group) for group in samples]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")


def to_json(value: Mapping[str, Any]) -> bytes:
    """Serialise to the JSON that shards use: sorted, compact and ASCII, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _split(path: str) -> tuple[str, str, str]:
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.partition(".")
    return folder + slash + stem, dot, suffix


def _parse_header(header: bytes, position: int) -> tuple[str, int, bytes]:
    stored = _octal(header[148:156])
    unsigned = sum(header[:148]) + 8 * 0x20 + sum(header[156:])
    if stored != unsigned:
        raise FormatError(f"tar header at byte {position} has a wrong checksum")
    name = header[:100].rstrip(b"\0").decode("utf-8", "surrogateescape")
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].rstrip(b"\0").decode("utf-8", "surrogateescape")
        name = f"{prefix}/{name}" if prefix else name
    # GNU tar writes sizes of 8 GiB and more as big-endian binary, marked by the top bit.
    field = header[124:136]
    size = int.from_bytes(field[1:], "big") if field[0] & 0x80 else _octal(field)
    return name, size, header[156:157]


def _octal(field: bytes) -> int:
    text = field.replace(b"\0", b" ").strip()
    if not _DIGITS.fullmatch(text):
        raise FormatError(f"tar header field {field!r} is not an octal number")
    return int(text or b"0", 8)


def _pax_path(data: bytes) -> str | None:
    path, at = None, 0
    while at < len(data):
        found = _LENGTH.match(data, at)
        length = int(found[1]) if found else 0
        if found is None or length < len(found[0]) + 1:
            raise FormatError("tar has a malformed pax header")
        name, _, value = data[found.end() : at + length].rstrip(b"\n").partition(b"=")
        if name == b"path":
            path = value.decode("utf-8", "surrogateescape")
        at += length
    return path
