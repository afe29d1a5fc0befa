"""Checks name the argument and its value, hashes equal those of `sha256sum`, and numbers are text for people."""

import math
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from fastvid.errors import UsageError
from fastvid.runtime import values
from fastvid.runtime.values import (
    check_choice,
    check_hint,
    check_least,
    check_seconds,
    sha256,
    sha256_of_file,
    sha256_of_pieces,
)  # fmt: skip
from tests.skips import soak_but


def refusal(check, *arguments, **values):
    with pytest.raises(UsageError) as refused:
        check(*arguments, **values)
    return str(refused.value)


def test_an_unknown_choice_is_refused_with_those_known():
    assert refusal(check_choice, "last", "pad", ("drop", "keep")) == "last is 'pad'\n  hint: use one of drop, keep"
    assert refusal(check_choice, "num_crops", 2, (1, 3)) == "num_crops is 2\n  hint: use one of 1, 3"
    for value in ("kepe", "keep_all_of_them"):
        assert "did you mean keep?" in refusal(check_choice, "last", value, ("drop", "keep"))
    check_choice("last", "keep", ("drop", "keep"))


def test_numbers_below_the_minimum_are_refused_by_name():
    assert refusal(check_least, 1, threads=2, prefetch=0) == "prefetch is 0, expected at least 1"
    assert refusal(check_least, 0.0, **{"optim.mixup": math.nan}) == "optim.mixup is nan, expected at least 0.0"
    check_least(1, threads=1, prefetch=None)


def test_numbers_beyond_their_limits_are_refused_with_these():
    assert [values.check_integer("crf", np.int8(one), 0, 51) for one in (0, 7, 51)] == [0, 7, 51]
    assert "folder is 3, expected a path" in refusal(values.path_text, "folder", 3)
    assert [values.path_text("folder", one) for one in ("a", Path("a"))] == ["a", "a"]
    assert refusal(values.check_integer, "crf", 52, 0, 51) == "crf is 52, expected 0 to 51"
    assert refusal(values.check_integer, "crf", -1, 0, 51) == "crf is -1, expected 0 to 51"
    assert "expected at least 1" in refusal(values.check_integer, "prefetch", 0, 1)
    assert f"expected 1 to {2**63 - 1}" in refusal(values.check_integer, "prefetch", 10**20, 1)  # numpy's integers end
    assert "crf is 1.5, expected an integer" in refusal(values.check_integer, "crf", 1.5)
    for share in (0, 0.5, 1):
        values.check_share("power", share)
    for value in (-0.1, 1.1, math.nan, "0.5"):
        assert f"power is {value!r}, expected 0 to 1" in refusal(values.check_share, "power", value)
    assert values.check_bounds("scale", [0.5, 1]) == (0.5, 1)
    assert "expected 0 < low <= high\n" in refusal(values.check_bounds, "scale", [0, 1])
    assert "expected 0 < low <= high <= 2\n" in refusal(values.check_bounds, "scale", [1, 3], 2)
    for value in (3, [1], [2, 1], [1, math.inf], ["a", 1]):
        assert "use scale=(low, high)" in refusal(values.check_bounds, "scale", value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_seconds_must_be_positive_and_finite(value):
    assert refusal(check_seconds, timeout=value) == f"timeout is {value}, expected a positive number of seconds"
    check_seconds(timeout=0.001)


def test_hashes_equal_sha256sum_for_every_input_form(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(data := np.random.default_rng(0).bytes(100_003))
    wanted = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    assert sha256(data) == wanted
    with path.open("rb") as file:
        assert sha256_of_file(file.fileno()) == wanted
    for name in ("_BLOCK", "_READ"):
        monkeypatch.setattr(values, name, 1 << 10)  # many blocks, the last one not full
    assert sha256(memoryview(data)) == wanted
    with path.open("rb") as file:
        file.seek(5)
        assert sha256_of_file(file.fileno()) == wanted
        assert file.tell() == 5
    assert sha256_of_pieces([data[:7], b"", memoryview(data)[7:]]) == wanted
    assert sha256(b"") == sha256_of_pieces([])


def test_values_of_another_kind_than_their_hint_are_refused():
    for value, hint in [("a", str), (np.int64(3), int), (3, float), (None, int | None), (["a"], tuple[str, ...])]:
        check_hint("size", value, hint)
    check_hint("size", object(), Path)  # types that are not plain are checked elsewhere
    assert refusal(check_hint, "size", 2.5, int) == "size is 2.5, expected a whole number"
    assert refusal(check_hint, "size", 2.5, int | None) == "size is 2.5, expected a whole number or none"
    assert refusal(check_hint, "keys", "a", tuple[str, ...]).endswith("expected a tuple\n  hint: write ('a',)")
    assert refusal(check_hint, "keys", [1], tuple[str, ...]) == "keys is [1], expected a tuple"
    assert refusal(check_hint, "last", "no", Literal["drop", "keep"]).startswith("last is 'no'")


def test_numbers_are_formatted_for_people():
    assert [values.size(n) for n in (0, 999, 1000, 12_345, 456_789, 3.1e9, 5e15)] == [
        "0 B", "999 B", "1 kB", "12.3 kB", "457 kB", "3.1 GB", "5000 TB",
    ]  # fmt: skip
    assert [values.duration(s) for s in (0.04, 0.94, 0.95, 1.44, 9.84, 59.94, 59.96, 200, 3599, 3600, 7500)] == [
        "0.04 s", "0.94 s", "0.9 s", "1.4 s", "9.8 s", "59.9 s", "1 min 0 s", "3 min 20 s", "59 min 59 s", "1 h 0 min",
        "2 h 5 min",
    ]  # fmt: skip
    assert [values.duration(s) for s in (359_999, 360_000, 1e6)] == ["99 h 59 min", "100 h", "278 h"]
    assert [values.things(n, "clip") for n in (0, 1, 1200)] == ["0 clips", "1 clip", "1,200 clips"]
    assert [values.percent(a, 1000) for a in (0, 1, 500, 999, 1000)] == ["0 %", "<1 %", "50 %", ">99 %", "100 %"]
    # A Chinese letter takes two columns of a terminal, an accent of its own none.
    assert [values.padded(name, 6) + "|" for name in ("run", "\u8dd1\u6b65", "cafe\u0301", "playing")] == [
        "run   |", "\u8dd1\u6b65  |", "cafe\u0301  |", "playing|",
    ]  # fmt: skip


def test_values_are_text_for_people():
    assert [values.words(one) for one in ({"a": 1, "b": None}, ["x", 2], (), "text", 7)] == [
        "a 1, b None", "x, 2", "", "text", "7",
    ]  # fmt: skip
    found = {
        "packed": 1234, "bytes": {"in": 2048}, "seconds": 200.0, "rate": 2 / 3, "rejected": [1], "dry": True,
        "note": None, "name": "a\x1b[2J", "tries": {"seconds": 1.0, "zone": 0.5},
    }  # fmt: skip
    assert dict(line.split(maxsplit=1) for line in values.listing(found).splitlines()) == {
        "packed": "1,234", "bytes.in": "2.05 kB", "seconds": "3 min 20 s", "rate": "0.6667", "dry": "True", "note": "-",
        "name": "a\\x1b[2J", "tries.seconds": "1.0 s", "tries.zone": "0.5",
    }  # fmt: skip
    sizes = Counter({name: 10 - number for number, name in enumerate("abcdefghij")})
    assert values.shares(sizes).split(", ")[3:] == ["d 13 %", "6 others"]
    assert [values.shares(Counter("abcde"[:count])).split(", ")[-1] for count in (4, 5)] == ["d 25 %", "1 other"]
    assert values.json_text({"a": [math.nan, 1.5, (math.inf,)], "b": "x"}) == '{"a": [null, 1.5, [null]], "b": "x"}'


@pytest.mark.parametrize(
    "value", [2.0, -0.1, [0.1, 0.2], [0.1] * 4, [0, 0, 1.1], [0, -1, 0], "abc", [True, 0, math.nan]]
)
def test_channels_are_one_or_three_numbers_within_their_limits(value):
    assert values.check_channels("mean", 0.5, 1) == (0.5, 0.5, 0.5)
    assert values.check_channels("mean", [0, 0.25, 1], 1) == (0, 0.25, 1)
    assert "expected one or three numbers from 0 to 1" in refusal(values.check_channels, "mean", value, 1)


RACE = """
import sys, threading
from dataclasses import make_dataclass
import msgspec
from fastvid.runtime.values import as_type

sys.setswitchinterval(1e-6)
make = {make}
for number in range(100):
    inner = make_dataclass(f"Inner{{number}}", [(f"f{{n}}", int, 1) for n in range(10)])
    outer = make_dataclass(f"Outer{{number}}", [("a", int, 0), ("b", inner, None), ("c", dict[str, inner], None)])
    start = threading.Barrier(8)

    def first():
        start.wait()
        assert make({{"a": 3, "b": {{"f1": 2}}, "c": {{"x": {{"f2": 1}}}}}}, outer).b.f1 == 2

    threads = [threading.Thread(target=first) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


@pytest.mark.parametrize(
    ("make", "code"), soak_but([("as_type", 0), ("msgspec.convert", -signal.SIGSEGV)], ("as_type", 0))
)
def test_threads_that_make_the_first_values_of_a_type_at_once_do_not_crash(make, code):
    """The second is the control: when it ends well, `as_type` can go."""
    assert subprocess.run([sys.executable, "-c", RACE.format(make=make)], check=False).returncode == code
