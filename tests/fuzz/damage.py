"""Damages small valid inputs at random: bytes, text, values of JSON and of tables; the same for the same seed."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.format.generations import sealed

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), "", " ", "0", "-1", "nan", "1e999", "null", "none", "\0", "\n", "\x1b[2J", "\ud800",
    "a" * 5000,
    "../../etc/passwd", "/dev/zero", "http://127.0.0.1:9/x", "{x}", "{chunk_index:0999999999d}", "{", "%s%n", "é",
    [], {}, [[]], {"": None}, ["a", 1, None], [[[1]]], [float("nan")], {"a": {"b": {"c": []}}}, [0] * 3000,
)  # fmt: skip
"""Values of which readers have thought less often."""
_DEEP = 100_000


def of_bytes(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Flip, cut, repeat, move, overwrite or mix bytes."""
    made, size = bytearray(data), len(data)
    at, length = draw.randrange(size + 1), draw.choice([1, 2, 4, 8, 64, 512, max(1, size // 2)])
    match draw.randrange(8):
        case 0:
            for _ in range(draw.choice([1, 1, 2, 8])):
                made[draw.randrange(size)] ^= 1 << draw.randrange(8)
        case 1:
            del made[at:]
        case 2:
            del made[at : at + length]
        case 3:
            made[at:at] = made[at : at + length] * draw.choice([1, 2, 100])
        case 4:
            made[at : at + length] = draw.choice([b"\0", b"\xff", b"\x7f"]) * length
        case 5:
            made[at : at + length] = draw.randbytes(length)
        case 6:
            other = draw.choice(others)
            made[at:] = other[draw.randrange(len(other) + 1) :]
        case _:
            number = draw.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
            made[at : at + 8] = number.to_bytes(8, draw.choice(["little", "big"]))
    return bytes(made)


def of_value(value: Any, draw: random.Random) -> Any:
    """Change one value somewhere inside JSON: to an odd one, to one of elsewhere, or away."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not len(inner) or draw.random() < 0.1:
        return draw.choice(ODD)
    place, made = draw.choice(inner), value.copy()
    match draw.randrange(10):
        case 0:
            del made[place]
        case 1:
            made[place] = value[draw.choice(inner)]
        case 2 if isinstance(made, dict):
            made[draw.choice(["", "\0", "a" * 300, "../x", "weight", "e\x1b[1m"])] = made.pop(place)
        case 3 if isinstance(made, list):
            made += made[place : place + 1] * draw.choice([1, 1000])
        case _:
            made[place] = of_value(value[place], draw)
    return made


def of_json(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Damage what a JSON text says, or the text."""
    if draw.random() < 0.2:
        return of_bytes(data, draw, others)
    if draw.random() < 0.02:
        return draw.choice(["[", '{"a":']).encode() * _DEEP
    return json.dumps(of_value(json.loads(data), draw)).encode()


def of_sealed(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Damage a record, and make its checksum fit again, as whoever publishes it can."""
    made = of_json(data, draw, others)
    try:
        return sealed({name: value for name, value in json.loads(made).items() if name != "sha256"})
    except (ValueError, AttributeError, RecursionError):
        return made


def of_lines(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Damage one word of a text, a line of JSON, or bytes."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    if draw.random() < 0.3:
        return of_bytes(data, draw, others)
    if lines[at].startswith(b"{"):
        lines[at] = of_json(lines[at], draw, others)
    else:
        mark = draw.choice([b",", b" ", b"\t", b'"'])
        words = lines[at].split(mark)
        words[draw.randrange(len(words))] = str(draw.choice(ODD)).encode("utf-8", "surrogatepass")
        lines[at] = mark.join(words)
    return b"\n".join(lines * draw.choice([1, 1, 1, 2]))


def of_parquet(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Damage the rows of a table, its columns or types, or the bytes of the file."""
    table = pq.read_table(io.BytesIO(data))
    try:
        match draw.randrange(6):
            case 0:
                return of_bytes(data, draw, others)
            case 1:
                table = table.drop([draw.choice(table.column_names)])
            case 2:
                table = table.slice(0, draw.choice([0, 1])) if draw.random() < 0.5 else pa.concat_tables([table] * 2)
            case 3:
                at = draw.randrange(table.num_columns)
                kind = draw.choice([pa.string(), pa.binary(), pa.float64(), pa.int8(), pa.null(), pa.bool_()])
                table = table.set_column(at, table.column_names[at], table.column(at).cast(kind, safe=False))
            case 4:
                table = pa.Table.from_pylist([of_value(row, draw) for row in table.to_pylist()])
            case _:
                rows = table.to_pylist()
                name, value = draw.choice(table.column_names), draw.choice(ODD)
                table = pa.Table.from_pylist([row | {name: value} for row in rows])
        sink = io.BytesIO()
        pq.write_table(table, sink)
        return sink.getvalue()
    except (
        pa.ArrowException,
        TypeError,
        LookupError,
        ValueError,
        OverflowError,
        AttributeError,
    ):  # such a table cannot be
        return of_bytes(data, draw, others)


Damage = Callable[[bytes, random.Random, list[bytes]], bytes]
BY_SUFFIX: Mapping[str, Damage] = {
    "json": of_json, "jsonl": of_lines, "csv": of_lines, "txt": of_lines, "parquet": of_parquet,
}  # fmt: skip
"""What damages a file, by its suffix; bytes else."""


def damaged(name: str, data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Return a file damaged once or a few times."""
    change = BY_SUFFIX.get(name.rpartition(".")[2], of_bytes)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        try:
            data = change(data, draw, others) if data else data
        except (ValueError, RecursionError, OSError, pa.ArrowException):  # it is damaged too much to be parsed
            data = of_bytes(data, draw, others)
    return data
