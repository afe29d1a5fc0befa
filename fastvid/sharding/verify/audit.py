"""Searches all files of a dataset for what was taken down: hashes, stored bytes and names.

Every file is searched, whoever wrote it: its name, its raw bytes, and what is compressed in it, which are the columns
and the metadata of Parquet files. Of every tar each member is hashed. Allowed are the block list, the receipts and the
rows of the ledger without a name, which contain hashes on purpose.

Tests an installation with one tiny video: shards, opens, plans and decodes it, and reports the step that fails.

Version numbers are not trusted: a library that can be imported may lack a function that sharding needs.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.decode.backends import Backend
from fastvid.decode.parity import SampleClip
from fastvid.errors import DecodeError, FastvidError, FormatError, JobError, StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import AUDIO, BLOCKED, LEDGER, REMOVALS, Codec, from_parquet, member_suffix
from fastvid.format.tar import TarMember, read_members, sample_groups
from fastvid.media.timing import Reason
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import sha256
from fastvid.sharding.job.ledger import DELETED, STATES, Receipt, is_nameless, read_blocked
from fastvid.storage import LocalStorage, RemoteOptions, Storage, open_storage
from fastvid.storage.urls import read_pieces

_FEWEST_LETTERS: Final = 3


@dataclass(frozen=True, slots=True)
class Trace:
    """Something that should be gone, or a door that is open.

    Attributes:
        file: The file.
        what: What is in it.
    """

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of `audit_removals`.

    Attributes:
        files: Files that were searched.
        bytes: Their size in bytes.
        members: Members of tars that were hashed.
        traces: What was found; empty if nothing is left.
    """

    files: int
    bytes: int
    members: int
    traces: tuple[Trace, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.traces

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        found = [{"file": trace.file, "found": trace.what} for trace in self.traces]
        return {"files": self.files, "bytes": self.bytes, "members": self.members, "found": found, "ok": self.ok}


def audit_removals(
    url: str,
    receipts: Sequence[Receipt],
    *,
    names: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Search a dataset, and the cache of this machine, for what receipts say is gone.

    Args:
        url: The dataset's folder.
        receipts: The receipts, from `fastvid.sharding.job.ledger.read_receipts` or a file that was kept elsewhere.
        names: Names, keys, captions: any text of at least three letters that must not occur. Receipts contain none.
        progress: Called before each file with the number of searched files and their total.

    Raises:
        UsageError: If a name is too short to search for, or there is nothing to search for.
        StorageError: If a file cannot be read.
    """
    if not receipts and not names:
        raise UsageError("there is nothing to search for", hint="give a receipt, or text with --name")
    short = next((name for name in names if len(name) < _FEWEST_LETTERS), None)
    if short is not None:
        raise UsageError(f"{short!r} is too short to search for", hint="give at least three letters")
    search = _Search(names, receipts)
    storage = open_storage(url)
    places = [(storage, "")]
    cache = RemoteOptions().cache_folder()
    if not isinstance(storage, LocalStorage) and cache is not None and cache.is_dir():
        places.append((open_storage(cache), f"{cache}/"))
    files = [(place, name, prefix) for place, prefix in places for name in _every_file(place)]
    for number, (place, name, prefix) in enumerate(files):
        if progress is not None:
            progress(number, len(files))
        search.file(place, name, f"{prefix}{name}")
    for receipt in receipts:
        search.traces += _open_ends(storage, receipt)
    return Audit(len(files), search.bytes, search.members, tuple(dict.fromkeys(search.traces)))


def _open_ends(storage: Storage, receipt: Receipt) -> Iterator[Trace]:
    """Yield what is left to do: hashes that are not blocked, steps that were not taken."""
    number = sum(digest not in read_blocked(storage) for digest in receipt.hashes)
    if number:
        yield Trace(BLOCKED, f"{number} of {len(receipt.hashes)} hashes are not blocked")
    if receipt.state != DELETED:
        yield Trace(f"receipt {receipt.number}", STATES[receipt.state])


def _every_file(storage: Storage) -> list[str]:
    """Return the names of all files, on a local disk also of those that are being written."""
    if not isinstance(storage, LocalStorage):
        return storage.list()
    root = Path(storage.root)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


class _Search:
    """Searches files for names and hashes."""

    def __init__(self, names: Sequence[str], receipts: Sequence[Receipt]) -> None:
        self.traces: list[Trace] = []
        self.bytes = self.members = 0
        self._names: dict[bytes, str] = {}
        for name in names:
            # As text, as the JSON of shards escapes it, and as tables store what is not UTF-8.
            stored = encode_name(name)
            for form in (stored.encode(), json.dumps(stored)[1:-1].encode()):
                self._names[form] = f"the name {name!r}"
        self._hashes = {
            digest.encode(): f"the hash of source {digest[:16]}" for receipt in receipts for digest in receipt.hashes
        }
        self._stored = {member.sha256 for receipt in receipts for member in receipt.members}

    def file(self, storage: Storage, name: str, shown: str) -> None:
        """Search one file."""
        records = name == BLOCKED or name.startswith(f"{REMOVALS}/")
        # Rows of the ledger are told apart by their decoded columns; hashes are not in their raw bytes alone.
        terms = self._names if records or name == LEDGER else self._names | self._hashes
        self._note(shown, self._matches(name.encode(errors="surrogateescape"), terms))
        try:
            size, longest = storage.size(name), max(map(len, terms), default=1)
            tail = b""
            for piece in read_pieces(storage, name):
                data = tail + piece
                self._note(shown, self._matches(data, terms))
                tail = data[-longest + 1 :] if longest > 1 else b""
            self.bytes += size
            head = _start(storage, name, size)
            if head.startswith(b"PAR1"):
                self._parquet(storage, name, shown, terms)
            elif head[257:262] == b"ustar":
                self._tar(storage, name, shown)
        except StorageError:
            if storage.exists(name):
                raise
            # It was temporary, and has been deleted meanwhile.

    def _tar(self, storage: Storage, name: str, shown: str) -> None:
        view = storage.map(name)
        try:
            for _, members in sample_groups(read_members(view)):
                data = {member: view[member.offset : member.offset + member.size] for member in members}
                self.members += len(members)
                for member, content in data.items():
                    # Silence is encoded to the same bytes for every source.
                    silence = member.suffix == member_suffix(AUDIO) and self._has_other_source(data)
                    if sha256(content) in self._stored and not silence:
                        self.traces.append(Trace(shown, f"the bytes of a removed sample, as member {member.name!r}"))
        except FormatError as error:
            self.traces.append(Trace(shown, f"a tar that cannot be read to its end: {error.message}"))

    def _has_other_source(self, members: Mapping[TarMember, memoryview]) -> bool:
        """Return whether a sample's JSON names the hash of a source that was not removed."""
        for member, content in members.items():
            if member.suffix == "json":
                with contextlib.suppress(ValueError, AttributeError):
                    digest = json.loads(bytes(content)).get("source_sha256")
                    return isinstance(digest, str) and digest.encode() not in self._hashes
        return False

    def _parquet(self, storage: Storage, name: str, shown: str, terms: Mapping[bytes, str]) -> None:
        try:
            table = from_parquet(storage.read(name), file=name)
        except FormatError as error:
            self.traces.append(Trace(shown, f"a table that cannot be read: {error.message}"))
            return
        for key, value in (table.schema.metadata or {}).items():
            self._note(shown, self._matches(key + b"\n" + value, terms))
        if name == LEDGER:
            # Here a hash may stand, and only here: in the row of a source that was taken down.
            named = [not is_nameless(row) for row in table.to_pylist()]
            self._columns(table.filter(pa.array(named, pa.bool_())), shown, self._hashes)
        self._columns(table, shown, terms)

    def _columns(self, table: pa.Table, shown: str, terms: Mapping[bytes, str]) -> None:
        for field, column in zip(table.schema, table.columns, strict=True):
            self._note(shown, self._matches(field.name.encode(), terms))
            for texts in _texts(column):
                for term, what in terms.items():
                    if pc.any(pc.match_substring(texts, term.decode("utf-8", "surrogateescape"))).as_py():
                        self.traces.append(Trace(shown, f"{what}, in column {field.name!r}"))

    def _matches(self, data: bytes, terms: Mapping[bytes, str]) -> Iterator[str]:
        return (what for term, what in terms.items() if term in data)

    def _note(self, shown: str, found: Iterator[str]) -> None:
        self.traces += [Trace(shown, what) for what in found]


def _start(storage: Storage, name: str, size: int) -> bytes:
    """Return the first bytes of a file: as many as tell a tar or a Parquet file."""
    data = bytearray(min(size, 512))
    if data:
        storage.read_into(name, [(0, memoryview(data))])
    return bytes(data)


def _texts(column: Any) -> Iterator[Any]:
    """Yield the texts and bytes in a column, at any depth."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        kind = chunk.type
        if pa.types.is_dictionary(kind):
            yield from _texts(chunk.dictionary)
        elif pa.types.is_struct(kind):
            for number in range(kind.num_fields):
                yield from _texts(chunk.field(number))
        elif pa.types.is_map(kind):
            yield from _texts(chunk.keys)
            yield from _texts(chunk.items)
        elif pa.types.is_nested(kind):
            yield from _texts(chunk.flatten())
        elif kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            yield chunk
        elif kind in (pa.string_view(), pa.binary_view()):
            yield chunk.cast(pa.large_binary())


_PROFILE: Final = "compact"
_FRAMES: Final = 40  # more than one GOP
_WIDTH, _HEIGHT = 336, 256  # a size that the profile does not scale
# Pixels per frame that a wave, one period per picture width, moves: it changes a pixel by at most nine levels.
_SHIFT: Final = 8
# Largest error of a frame, in levels: encoding causes one level, a wrong range or matrix eight.
_MOST_OFF: Final = 4.0

_FFMPEG_HINT: Final = "name another ffmpeg in FASTVID_FFMPEG, or `pip install --upgrade imageio-ffmpeg`"
_PYAV_HINT: Final = "install another version of PyAV, for example by `pip install --upgrade av`"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SelfTestStep:
    """The result of one step."""

    name: str
    seconds: float
    found: str = ""
    problem: str | None = None
    hint: str | None = None


def self_test(decoders: Iterable[Backend]) -> Iterator[SelfTestStep]:
    """Shard a tiny video with the default profile and decode it; stop if a step fails that later steps need."""
    with tempfile.TemporaryDirectory(prefix="fastvid-self-test-") as name:
        folder = Path(name)
        step, dataset = _try("shard", lambda: _shard(folder))
        yield step
        if dataset is None:
            return
        step, clip = _try("plan", lambda: _plan(dataset))
        yield step
        if clip is None:
            return
        for one in decoders:
            if Codec.H264 in one.codecs:
                yield _try(f"decode {one.name}", partial(_decode, clip, one))[0]


def _try(name: str, work: Callable[[], tuple[str, _T]]) -> tuple[SelfTestStep, _T | None]:
    begun = time.perf_counter()
    try:
        found, result = work()
    except FastvidError as error:
        return SelfTestStep(name, time.perf_counter() - begun, problem=error.message, hint=error.hint), None
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the problem to report
        return SelfTestStep(name, time.perf_counter() - begun, problem=f"{type(error).__name__}: {error}"), None
    return SelfTestStep(name, time.perf_counter() - begun, found), result


def _shard(folder: Path) -> tuple[str, Dataset]:
    """Run a job as ``fastvid shard`` does."""
    from fastvid.sharding.job.job import run_job  # imported here, because importing PyAV may be what fails

    source, out = folder / "wave.y4m", folder / "shards"
    source.write_bytes(_video())
    log = logging.getLogger("fastvid")
    level = log.level
    log.setLevel(logging.CRITICAL)  # the result is reported by the step
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            run_job(source, out, profile=_PROFILE, workers=1)
    except JobError as error:
        raise _why(str(out)) or error from error
    finally:
        log.setLevel(level)
    dataset = Dataset(str(out))
    size = dataset.generation.shards[0].bytes
    return f"{_FRAMES} frames probed, encoded by profile {_PROFILE}, verified and packed: {size} bytes", dataset


def _why(out: str) -> JobError | None:
    """Return the ledger's error for the only source."""
    from fastvid.sharding.job.ledger import read_ledger

    storage = open_storage(out)
    if not storage.exists(LEDGER):
        return None
    (row,) = read_ledger(storage)[0].to_pylist()
    phase = re.search(r"in phase (\w+)", row["message"] or "")
    blamed = _PYAV_HINT if row["reason"] == Reason.CRASHED and phase and phase[1] != "encode" else _FFMPEG_HINT
    return JobError(f"{row['reason']}: {row['message']}", hint=blamed)


def _plan(dataset: Dataset) -> tuple[str, SampleClip]:
    shard = dataset.shard(0)
    start, size = shard.member(0)
    video = bytes(dataset.storage.map(shard.data)[start : start + size])
    clip = SampleClip("self-test", video, (shard.info(0), shard.table(0)))
    if clip.info.num_frames != _FRAMES:
        raise FormatError(f"the sample has {clip.info.num_frames} frames, {_FRAMES} were encoded")
    packets = len(clip.table.plan(clip.frames).packets)
    return f"{len(clip.frames)} frames need {packets} of {_FRAMES} packets", clip


def _decode(clip: SampleClip, one: Backend) -> tuple[str, None]:
    decoder = one.open()
    try:
        pictures = clip.decode(decoder, one.device, clip.frames)
    finally:
        decoder.close()
    # The wave is grey and the same in every row.
    rows = pictures.astype(np.float64).mean(axis=(0, 2))
    wanted = (_wave() - 16) * (255 / 219)  # limited range
    off = np.abs(rows[:, None] - wanted).mean(axis=2)
    given = off.argmin(axis=1)
    if (given != clip.frames).any():
        raise DecodeError(f"requested frames {clip.frames.tolist()}, decoded frames that look like {given.tolist()}")
    worst = float(off.min(axis=1).max())
    if worst > _MOST_OFF:
        raise DecodeError(f"colours differ by {worst:.1f} of 255 levels, at most {_MOST_OFF:.0f} are allowed")
    return f"the {len(given)} requested frames, with an error of {worst:.1f} of 255 levels", None


def _wave() -> npt.NDArray[np.float64]:
    """Return the luma of a row of each frame, float64 [N, W], limited range."""
    moved = np.arange(_WIDTH) - _SHIFT * np.arange(_FRAMES)[:, None]
    wave: npt.NDArray[np.float64] = np.rint(126 + 100 * np.sin(2 * np.pi * moved / _WIDTH))
    return wave


def _video() -> bytes:
    """Return the wave as a YUV4MPEG2 file, which needs no encoder."""
    grey = bytes([128]) * (_WIDTH * _HEIGHT // 2)
    rows = _wave().astype(np.uint8)
    frames = (b"FRAME\n" + row.tobytes() * _HEIGHT + grey for row in rows)
    return f"YUV4MPEG2 W{_WIDTH} H{_HEIGHT} F25:1 Ip A1:1 C420mpeg2\n".encode() + b"".join(frames)
