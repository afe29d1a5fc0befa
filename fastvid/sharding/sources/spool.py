"""Lists of any length in little memory: some items at a time are objects, all others are in a temporary file.

Ten million videos would take ten gigabytes as objects. A `Spool` writes its items in blocks of some hundred to a file
without a name, which disappears with it. `sort` merges sorted runs of a list that does not fit into memory. A list
shorter than a block, or a run, touches no disk.
"""

from __future__ import annotations

import heapq
import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice, starmap
from operator import attrgetter
from typing import IO, Any, Final, TypeVar

from fastvid.errors import StorageError

T = TypeVar("T")

_BLOCK: Final = 256  # items that are written and read at a time
_RUN: Final = 1 << 15  # items that are sorted in memory
_HINT: Final = "free some space, or name another folder in TMPDIR"
_CACHED: Final = 64  # blocks that stay in memory for access to single items


class Spool(Sequence[T]):
    """A list that only grows; its slices are views. It is pickled as a tuple. Objects of one dataclass are quickest."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._file: IO[bytes] | None = None
        self._ends, self._last = array("q", [0]), list[T]()
        self._cache: dict[int, list[T]] = {}
        self.extend(items)

    def extend(self, items: Iterable[T]) -> None:
        """Append items."""
        items = iter(items)
        while more := list(islice(items, _BLOCK - len(self._last))):
            self._last += more
            if len(self._last) == _BLOCK:
                self._write()

    def items(self, places: range) -> Iterator[T]:
        """Yield the items at some places, which follow each other."""
        for number in range(places.start // _BLOCK, -(-places.stop // _BLOCK)):
            first = number * _BLOCK
            yield from self._read(number)[max(places.start - first, 0) : places.stop - first]

    def __len__(self) -> int:
        return (len(self._ends) - 1) * _BLOCK + len(self._last)

    def __iter__(self) -> Iterator[T]:
        return self.items(range(len(self)))

    def __getitem__(self, at: Any) -> Any:
        place = range(len(self))[at]
        if isinstance(place, range):
            return _Part(self, place)
        number = place // _BLOCK
        if (block := self._cache.get(number)) is None:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            block = self._cache[number] = self._read(number)
        return block[place % _BLOCK]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)

    def _write(self) -> None:
        kind = type(self._last[0]) if is_dataclass(self._last[0]) else None
        names = [] if kind is None else [one.name for one in fields(kind)]  # type: ignore[arg-type]
        items = list(map(attrgetter(*names), self._last)) if names else self._last
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="fastvid-")  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            written = self._file.write(pickle.dumps((kind, items), pickle.HIGHEST_PROTOCOL))
            self._file.flush()
        except OSError as error:
            raise StorageError(f"list is not kept: {error.strerror}", file=tempfile.gettempdir(), hint=_HINT) from error
        self._ends.append(self._ends[-1] + written)
        self._last = []

    def _read(self, number: int) -> list[T]:
        if number == len(self._ends) - 1:
            return self._last
        assert self._file is not None
        start, end = self._ends[number : number + 2]
        kind, items = pickle.loads(os.pread(self._file.fileno(), end - start, start))  # noqa: S301 - this process wrote it
        return items if kind is None else list(starmap(kind, items))


class _Part(Spool[T]):
    """Items of a list that follow each other."""

    def __init__(self, whole: Spool[T], places: range) -> None:
        self._whole, self._places = whole, places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        return self._whole.items(self._places)

    def __getitem__(self, at: Any) -> Any:
        place = self._places[at]
        return _Part(self._whole, place) if isinstance(place, range) else self._whole[place]


def sort(items: Iterable[T], key: Callable[[T], Any]) -> Iterator[T]:
    """Return an iterator over items in the order of a key; items of equal keys stay in their order."""
    items, runs = iter(items), Spool[T]()
    while run := sorted(islice(items, _RUN), key=key):
        if not runs and len(run) < _RUN:
            return iter(run)
        runs.extend(run)
        run.clear()  # before the next one is made
    return heapq.merge(*(runs[start : start + _RUN] for start in range(0, len(runs), _RUN)), key=key)
