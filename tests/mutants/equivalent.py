"""Mutants that no test can notice, each with the reason. An entry whose line changed must go: a test says so."""

from typing import Final

_COUNTS: Final = "every value that is counted was found at least once"
_FROZEN: Final = "nothing assigns to its fields; frozen=True keeps programmers from it"
_MEMORY: Final = "it decides how much memory is used, not what is found"
_EQUAL: Final = "both lists come from the same rows"
_PIECES: Final = "the hash does not depend on the size of the pieces"
_INSIDE: Final = "nobody passes it; init=False keeps programmers from it"
_VIDEOS: Final = "  # bytes of packet tables that a process keeps: of about 1,500 videos of 300 packets"
_UNPACKED: Final = "packed = zlib.decompressobj().decompress(times.data[_TICK.size :], 8 * (times.num_frames - 1)"
_STREAM: Final = 'columns.append(facts.filter(pc.equal(facts["stream"], generation.streams'
_HASHES: Final = '))["source_sha256"].combine_chunks())'
_CHECKED: Final = "views: Views, sampler: object, spatial: Spatial"
_COMMIT: Final = "storage: Storage, dataset_id: str, generation: Generation, annotations: pa.Table"

EQUIVALENT: Final[dict[str, tuple[tuple[str, str, str], ...]]] = {
    "fastvid/format/packets.py": (
        (
            "_KEYS: Final = bytes(flags for flags in range(256) if flags & PacketFlag.KEY)",
            "_KEYS: Final = bytes(flags for flags in range( 257) if flags & PacketFlag.KEY)",
            "256 has no bit of a flag, so it is not listed",
        ),
        (
            '_IN_ORDER: Final = np.arange(2**15, dtype="<i4").tobytes()',
            '_IN_ORDER: Final = np.arange(2** 14, dtype="<i4").tobytes()',
            "longer streams take the slower path to the same plan",
        ),
        (
            "return [offset + (above << 32) for offset, above in zip(low, high.tolist(), strict=True)]",
            "return [offset + (above << 32) for offset, above in zip(low, high.tolist(), strict=False)]",
            _EQUAL,
        ),
        ("@dataclass(eq=False, repr=False)", "@dataclass(eq=True, repr=False)", "nobody compares two caches"),
        (
            "_sizes: dict[K, int] = field(default_factory=dict, init=False)",
            "_sizes: dict[K, int] = field(default_factory=dict, init=True)",
            _INSIDE,
        ),
        ("_bytes: int = field(default=0, init=False)", "_bytes: int = field(default=0, init=True)", _INSIDE),
        (f"_TABLE_MEMORY: Final = 16 * 2**20{_VIDEOS}", f"_TABLE_MEMORY: Final = 15 * 2**20{_VIDEOS}", _MEMORY),
    ),
    "fastvid/format/presentation.py": (
        (
            f"{_UNPACKED} + 1)",
            f"{_UNPACKED} ^ 1)",
            "a multiple of 8 has no last bit",
        ),
    ),
    "fastvid/load/order/epoch.py": (
        ("sizes = counts[counts > 0].tolist()", "sizes = counts[counts != 0].tolist()", "counts are not negative"),
        (
            "_SMALL_SET: Final = 2**32  # below it, sample numbers fit in uint32",
            "_SMALL_SET: Final = 2-32  # below it, sample numbers fit in uint32",
            _MEMORY,
        ),
        ("_KEPT_WINDOWS: Final = 4", "_KEPT_WINDOWS: Final = 3", _MEMORY),
        (
            "@dataclass(frozen=True, slots=True, eq=False)",
            "@dataclass(frozen=True, slots=True, eq=True)",
            "shares are not compared; eq=False keeps programmers from comparing arrays",
        ),
        ("@dataclass(frozen=True, slots=True)", "@dataclass(frozen=False, slots=True)", _FROZEN),
    ),
    "fastvid/load/order/draws.py": (
        (
            "return max(1, ((size - 1).bit_length() + 1) // 2) if size else 1",
            "return max( 0, ((size - 1).bit_length() + 1) // 2) if size else 1",
            "it differs for one sample only, which has one order",
        ),
    ),
    "fastvid/load/workers/clip_worker.py": (
        ("break", "continue", "once an iteration is over it stays so, and nothing is done for the rows that follow"),
    ),
    "fastvid/decode/clips.py": (
        ("if len(scratch.data) < size:", "if len(scratch.data) <= size:", _MEMORY),
        ("starts = [0] * len(offsets)", "starts = [ 1] * len(offsets)", "each place is set below"),
        (
            "for number, (start, size, crc) in enumerate(zip(starts, sizes, crc32, strict=True)):",
            "for number, (start, size, crc) in enumerate(zip(starts, sizes, crc32, strict=False)):",
            _EQUAL,
        ),
    ),
    "fastvid/format/generations.py": (
        ("@dataclass(frozen=True, slots=True)", "@dataclass(frozen=False, slots=True)", _FROZEN),
        (
            f"{_COMMIT}, *, head: Head | None = None",
            f"{_COMMIT}, /, head: Head | None = None",
            "all callers pass head by name and the others by position",
        ),
        (
            'duplicate = next(c["values"] for c in counts.to_pylist() if c["counts"] > 1)',
            'duplicate = next(c["values"] for c in counts.to_pylist() if c["counts"] != 1)',
            _COUNTS,
        ),
    ),
    "fastvid/sharding/job/ledger.py": (
        (
            f"{_STREAM}[0]{_HASHES}",
            f"{_STREAM}[ -1]{_HASHES}",
            "all streams of a sample have the hash of its source",
        ),
        ("@dataclass(frozen=True, slots=True)", "@dataclass(frozen=False, slots=True)", _FROZEN),
        (
            "return ledger_row(source, Outcome(-1, reason=reason, message=message), None)",
            "return ledger_row(source, Outcome(1, reason=reason, message=message), None)",
            "a row does not contain the number of the source in the job",
        ),
    ),
    "fastvid/train/records/checkpoint.py": (
        (
            "if version != CHECKPOINT_VERSION:",
            "if version is not CHECKPOINT_VERSION:",
            "Python has one object for each small integer",
        ),
    ),
    "fastvid/runtime/values.py": (
        (
            'return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}" if number < 100 else '
            'f"{number:.0f} {unit}"',
            'return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}" if number < 101 else '
            'f"{number:.0f} {unit}"',
            "three digits of a number from 100 to 101 are its whole part",
        ),
        ("_BLOCK: Final = 1 << 24", "_BLOCK: Final = 2 << 24", _PIECES),
        ("_BLOCK: Final = 1 << 24", "_BLOCK: Final = 1 + 24", _PIECES),
        ("_BLOCK: Final = 1 << 24", "_BLOCK: Final = 1 ^ 24", _PIECES),
        ("_BLOCK: Final = 1 << 24", "_BLOCK: Final = 1 << 25", _PIECES),
        ("_BLOCK: Final = 1 << 24", "_BLOCK: Final = 1 << 23", _PIECES),
        ("_READ: Final = 1 << 20", "_READ: Final = 2 << 20", _PIECES),
        ("_READ: Final = 1 << 20", "_READ: Final = 1 * 20", _PIECES),
        ("_READ: Final = 1 << 20", "_READ: Final = 1 << 19", _PIECES),
        ("_READ: Final = 1 << 20", "_READ: Final = 1 << 21", _PIECES),
        ("_READ: Final = 1 << 20", "_READ: Final = 1 + 20", _PIECES),
        (
            'parts.append("1 other" if len(counts) - top == 1 else f"{len(counts) - top} others")',
            'parts.append("1 other" if len(counts) - top <= 1 else f"{len(counts) - top} others")',
            "it is not called with fewer",
        ),
    ),
    "fastvid/train/strategies/average.py": (
        (
            "levels = torch.where(scales[:, None] > 0, ratio, 0.0).nan_to_num(0.0).round().clamp(-most, most)",
            "levels = torch.where(scales[:, None] > 0, ratio, 0.0).nan_to_num( -1.0).round().clamp(-most, most)",
            "the scale of such a block is not finite, whatever it is multiplied by",
        ),
        (
            "wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)",
            "wide = any(tensor.dtype is torch.float64 for tensor in self.tensors)",
            "torch has one object for each dtype",
        ),
        ("@torch.no_grad()", "", "of `reduce`: the buffer and the anchor follow no gradient"),
    ),
    "fastvid/load/clips/views.py": (
        ("if self.num_crops == 3:", "if self.num_crops <= 3:", "the numbers below are refused, or returned before"),
        (
            "_NO_DRAWS: Final = Draws(0, 0, 0)",
            "_NO_DRAWS: Final = Draws(0, -1, 0)",
            "a sampler without shuffle draws nothing",
        ),
        (
            "@dataclass(frozen=True, repr=False)",
            "@dataclass(frozen=True, repr=True)",
            "the class has its own `__repr__`",
        ),
        (
            "places, along = np.array(_PLACES[: 5 if self.num_crops > 3 else 3]), np.array([0, 0.5, 1])",
            "places, along = np.array(_PLACES[: 6 if self.num_crops > 3 else 3]), np.array([0, 0.5, 1])",
            "there are five places",
        ),
        (
            f"{_CHECKED}, *, clips_per_video: int = 1, audio: bool = False",
            f"{_CHECKED}, *, clips_per_video: int = 0, audio: bool = False",
            "0 and 1 are both not above 1",
        ),
        (
            "if views.num_crops > 1 and (not isinstance(spatial.crop, CenterCrop) or spatial.flip is not None):",
            "if views.num_crops != 1 and (not isinstance(spatial.crop, CenterCrop) or spatial.flip is not None):",
            "there is at least one crop",
        ),
    ),
}
"""For each module: the line, the line after the change, and why nobody can tell them apart."""
