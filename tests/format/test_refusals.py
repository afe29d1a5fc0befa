"""Every refusal of a tampered dataset names the place and says what to do; no error of another library gets out."""

import json
import shutil
import warnings

import numpy as np
import pytest

import fastvid
from fastvid.errors import FastvidError
from fastvid.format.schema import PACKET_DTYPE, STREAM_DTYPE
from fastvid.storage import LocalStorage
from tests.datasets import edit_pkt, edit_record, make_clip, pack

MISSING = object()
VALUES = (MISSING, None, -1, "x", [], {}, 2**70)
NUMBERS = (0, 1, 3, 2**15 - 1, 2**31 - 1, 2**62, -1)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    clips = [make_clip(folder / f"{n}.mp4", frames=10 + n) for n in range(2)]
    pack(folder / "set", [[("c/0", clips[0], 0)], [("c/1", clips[1], 1)]], columns={"caption": ["a", "b"]})
    return folder / "set"


def refusal(folder):
    """Return the error of reading everything, or None; any other exception is a failure."""
    try:
        for video in fastvid.open(folder):
            video.frames([0, 3])
    except FastvidError as error:
        return error
    return None


def assert_clear(error, place):
    assert error.hint, error
    assert error.hint.split()[0] in {"run", "restore", "open", "give", "upgrade", "use", "create"}, error
    assert place in str(error), error


def paths(value, start=()):
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*start, key)
            yield from paths(value[key], (*start, key))


@pytest.mark.parametrize("name", ["dataset.json", "generations/000001.json"])
def test_a_record_with_a_wrong_value_is_refused_clearly(good, name, tmp_path):
    copy = tmp_path / "set"
    shutil.copytree(good, copy)
    whole, refused = json.loads((good / name).read_text()), 0
    for path in [path for path in paths(whole) if path[0] != "sha256"]:
        for value in VALUES:
            record = json.loads((good / name).read_text())
            place = record
            for key in path[:-1]:
                place = place[key]
            if value is MISSING:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            (copy / name).write_text(json.dumps(record))
            edit_record(LocalStorage(copy), name)
            if error := refusal(copy):
                refused += 1
                assert_clear(error, "" if path[0] == "generation" else str(copy.name))
    assert refused > 20


FIELDS = [
    (kind, field)
    for kind, dtype in (("stream", STREAM_DTYPE), ("packet", PACKET_DTYPE))
    for field in dtype.names
    if dtype[field].kind in "iu"
]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_packet_sidecar_with_a_wrong_number_is_right_or_refused_clearly(good, kind, field, tmp_path):
    for number in NUMBERS:
        copy = tmp_path / str(number)
        shutil.copytree(good, copy)

        def change(streams, packets, number=number):
            column = (streams if kind == "stream" else packets)[field]
            column[-1] = np.array(number, np.int64).astype(column.dtype)

        edit_pkt(LocalStorage(copy), "data-000001", change)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            error = refusal(copy)
        if error is not None:
            assert_clear(error, "data-000001")
