"""How the samples of a dataset are encoded, from the facts of some of its shards."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError
from fastvid.format.generations import Generation
from fastvid.format.parquet import from_parquet
from fastvid.runtime.arrays import BoolArray, IntArray
from fastvid.storage import Storage

# Facts are one file a shard, and a large dataset has 10,000 shards: these say enough about how they are encoded.
_MOST_SHARDS: Final = 64
_READERS: Final = 16

_COLUMNS: Final = (
    "stream", "num_frames", "fps_num", "fps_den", "codec", "color_range", "color_matrix", "conforms", "whole",
    "member_size", "num_packets", "num_keys", "num_droppable",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Encoding:
    """Statistics of the first stream of the visible samples of some shards."""

    facts: pa.Table
    shards: int
    of: int

    @property
    def is_complete(self) -> bool:
        """Whether the facts of all shards were read."""
        return self.shards == self.of

    @property
    def num_samples(self) -> int:
        """Number of samples whose facts were read."""
        return int(self.facts.num_rows)

    @cached_property
    def bytes(self) -> IntArray:
        """Size of each sample's stream in bytes."""
        return self._fact("member_size").astype(np.int64)

    @cached_property
    def bit_rate(self) -> float:
        """Bits per second, over all samples."""
        seconds = self._fact("num_frames") * self._fact("fps_den") / np.maximum(self._fact("fps_num"), 1)
        return float(8 * self.bytes.sum() / max(seconds.sum(), 1e-9))

    @cached_property
    def codecs(self) -> Counter[str]:
        """Number of samples by codec."""
        return Counter(self.facts["codec"].to_pylist())

    @cached_property
    def colours(self) -> Counter[str]:
        """Number of samples by colour range and matrix."""
        pairs = zip(self.facts["color_range"].to_pylist(), self.facts["color_matrix"].to_pylist(), strict=True)
        return Counter(f"{levels} {matrix}" for levels, matrix in pairs)

    @cached_property
    def packets_per_key(self) -> float:
        """Packets per key packet."""
        keys = int(self._fact("num_keys").sum())
        return int(self._fact("num_packets").sum()) / keys if keys else 0.0

    @cached_property
    def droppable_share(self) -> float:
        """Fraction of the packets that no other packet refers to."""
        packets = int(self._fact("num_packets").sum())
        return int(self._fact("num_droppable").sum()) / packets if packets else 0.0

    @cached_property
    def conforming(self) -> int:
        """Number of samples that keep the promises of profiles, because a profile wrote them."""
        return int(np.count_nonzero(self._fact("conforms")))

    @cached_property
    def whole(self) -> int:
        """Number of samples that must be decoded from their first packet."""
        return int(np.count_nonzero(self._fact("whole")))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "shards_read": self.shards,
            "samples": self.num_samples,
            "bytes": int(self.bytes.sum()),
            "bit_rate": self.bit_rate,
            "codecs": dict(self.codecs),
            "colours": dict(self.colours),
            "conforming": self.conforming,
            "whole": self.whole,
            "packets_per_key": self.packets_per_key,
            "droppable_share": self.droppable_share,
        }

    def _fact(self, name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.facts[name].to_numpy()
        return values


def read_encoding(storage: Storage, generation: Generation, visible: BoolArray) -> Encoding:
    """Read the facts of at most 64 shards, evenly spread.

    `visible`: which of the generation's samples are not removed, bool [N].
    """
    total = len(generation.shards)
    chosen = np.unique(np.linspace(0, total - 1, min(total, _MOST_SHARDS)).round().astype(np.int64)).tolist()
    ends = np.cumsum([shard.samples for shard in generation.shards])

    def read(index: int) -> pa.Table:
        shard = generation.shards[index]
        name = f"{shard.name}.parquet"
        table = from_parquet(storage.read(name), file=name, columns=list(_COLUMNS))
        table = table.filter(pc.equal(table["stream"], generation.streams[0]))
        if table.num_rows != shard.samples:
            raise FormatError(
                f"{table.num_rows} facts for {shard.samples} samples",
                file=name,
                hint="run `fastvid verify DIR --repair`, which rebuilds the facts of the dataset in DIR",
            )
        return table.filter(pa.array(visible[ends[index] - shard.samples : ends[index]]))

    with ThreadPoolExecutor(_READERS) as pool:
        tables = list(pool.map(read, chosen))
    facts = pa.concat_tables(tables) if tables else pa.table({name: [] for name in _COLUMNS})
    return Encoding(facts, len(chosen), total)
