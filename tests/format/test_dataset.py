"""Shards, sidecars, generations and selections on disk."""

import hashlib
import io
import subprocess
import sys
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import KEY_PATTERN, check_key
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members, wds2idx, write_tar
from fastvid.format.writing import sample_members, write_shard
from fastvid.storage import LocalStorage
from tests.datasets import make_clip, pack


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {name: make_clip(folder / f"{name}.mp4", frames=frames) for name, frames in (("long", 40), ("short", 7))}


def members(clips, number):
    meta = {"source_id": f"videos/{number}.avi", "conforms": True, "fps": "25"}
    return sample_members(meta, {"rgb": clips["short" if number % 3 else "long"]})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, clips):
    """Three shards of four samples, one of which is removed."""
    columns = {
        "removed": [n == 5 for n in range(12)],
        "split": ["train" if n % 4 else "val" for n in range(12)],
        "split2": ["test" if n < 6 else "train" for n in range(12)],
        "caption": [f"clip {n}" for n in range(12)],
    }
    samples = [(f"c/{n:03d}", clips["short" if n % 3 else "long"], n % 2) for n in range(12)]
    return pack(tmp_path_factory.mktemp("dataset"), [samples[:4], samples[4:8], samples[8:]], columns=columns).root


def test_tar_is_plain_and_depends_only_on_its_samples(tmp_path, clips):
    store = LocalStorage(tmp_path)
    one = write_shard(store, "data-000000", [(f"c/{n}", members(clips, n)) for n in range(4)])
    two = write_shard(store, "data-000001", [(f"c/{n}", members(clips, n)) for n in range(4)])
    assert one == two
    data = store.read("data-000000.tar")
    assert hashlib.sha256(data).hexdigest() == one.sha256
    assert len(data) == one.bytes
    listed = subprocess.run(
        ["tar", "tf", str(tmp_path / "data-000000.tar")], capture_output=True, check=True, text=True
    )
    assert listed.stdout.split() == [f"c/{n}.{suffix}" for n in range(4) for suffix in ("json", "mp4")]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive]
    assert [(m.name, m.offset, m.size) for m in read_members(memoryview(data))] == expected


def with_pax(records: bytes, name: str = "a.mp4") -> memoryview:
    """Return a tar of an empty file after a pax header with these records."""
    head, info = tarfile.TarInfo("records"), tarfile.TarInfo(name)
    head.type, head.size = tarfile.XHDTYPE, len(records)
    parts = (head.tobuf(tarfile.USTAR_FORMAT), records, bytes(-len(records) % 512), info.tobuf(tarfile.USTAR_FORMAT))
    return memoryview(b"".join((*parts, bytes(1024))))


def test_long_names_are_read_and_pax_headers_that_tell_too_much_take_little_time():
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        made, name = io.BytesIO(), "folder/" * 40 + "é.mp4"
        with tarfile.open(fileobj=made, mode="w", format=kind) as tar:
            tar.addfile(tarfile.TarInfo(name))
        assert [member.name for member in read_members(memoryview(made.getvalue()))] == [name]
    assert [member.name for member in read_members(with_pax(b"5 a=\n" * 1_000_000))] == ["a.mp4"]
    for records in (b"1" * 10_000, b"2 a", b"a=b\n", b"-1 a=b\n", b"1_0 path=b\n"):
        with pytest.raises(FormatError, match="malformed pax header"):
            list(read_members(with_pax(records)))


def test_idx_is_identical_to_that_of_dali_wds2idx(dataset, tmp_path):
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    out = tmp_path / "expected.idx"
    subprocess.run([sys.executable, "-m", "wds2idx", "data-000000.tar", str(out)], cwd=dataset, check=True, timeout=300)
    assert out.read_bytes() == (dataset / "data-000000.idx").read_bytes()


def test_dataset_selects_by_split_filter_and_removal(dataset):
    everything = Dataset(str(dataset))
    assert len(everything) == 11, "one of twelve is removed"
    assert "c/005" not in everything.keys.to_pylist()
    train = Dataset(str(dataset), split="train")
    assert train.keys.to_pylist() == [f"c/{n:03d}" for n in range(12) if n % 4 and n != 5]
    assert Dataset(str(dataset), split="split2:test").keys.to_pylist() == [f"c/{n:03d}" for n in range(5)]
    long = Dataset(str(dataset), split="train", where="num_frames >= 20 and caption != 'clip 9'")
    assert long.keys.to_pylist() == ["c/003", "c/006"]
    assert long.labels.tolist() == [1, 0]
    shards, rows = long.locate([0, 1])
    assert (shards.tolist(), rows.tolist()) == ([0, 1], [3, 2])
    assert long.find("c/006") == 1
    for call in (
        lambda: Dataset(str(dataset), split="nope"),
        lambda: Dataset(str(dataset), split="split7:x"),
        lambda: Dataset(str(dataset), where="num_frames > 1000"),
        lambda: Dataset(str(dataset), where="frames > 10"),
        lambda: Dataset(str(dataset), where="__import__('os').system('true')"),
        lambda: Dataset(str(dataset), where="num_frames >"),
        lambda: Dataset(str(dataset), where='num_frames > "a"'),
        lambda: long.find("c/005"),
        lambda: long.column("nothing"),
    ):
        with pytest.raises(UsageError):
            call()


@given(st.text(alphabet="abz019_-/. é", max_size=100))
def test_check_key_accepts_exactly_the_key_grammar(text):
    if KEY_PATTERN.fullmatch(text) and len(text.encode()) <= 90:
        assert check_key(text) == text
    else:
        with pytest.raises(UsageError):
            check_key(text)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.from_regex(KEY_PATTERN, fullmatch=True).filter(lambda k: len(k) <= 90 and not k.endswith("/")),
            st.binary(max_size=1500),
        ),
        unique_by=lambda pair: pair[0],
        max_size=6,
    )
)
def test_tar_members_round_trip(samples):
    out = io.BytesIO()
    digest = write_tar(out, [(key, {"json": b"{}", "mp4": data}) for key, data in samples])
    view = memoryview(out.getvalue())
    assert digest.samples == len(samples)
    found = [(m.key, bytes(view[m.offset : m.offset + m.size])) for m in read_members(view) if m.suffix == "mp4"]
    assert found == samples
    lines = wds2idx(read_members(view)).decode().splitlines()
    assert lines[0] == f"v1.2 {len(samples)}"
    assert len(lines) == len(samples) + 1


def test_index_error_names_the_bad_sample(tmp_path, clips):
    store = LocalStorage(tmp_path)
    for broken, message in (
        ({"mp4": clips["short"]}, "no JSON"),
        ({"json": b"{}"}, "no mp4 member"),
        ({"json": b"{", "mp4": clips["short"]}, "cannot parse the sample.s JSON"),
        ({"json": b"[" * 200_000, "mp4": clips["short"]}, "cannot parse the sample.s JSON"),
        ({"json": b"{}", "mp4": clips["short"][:200]}, "exceeds the file"),
    ):
        with pytest.raises(FormatError, match=message) as caught:
            write_shard(store, "data-000000", [("good", members(clips, 1)), ("bad", broken)])
        assert caught.value.where["key"] == "bad"
        assert caught.value.where["shard"] == "data-000000"
    with pytest.raises(UsageError, match="duplicate key"):
        write_shard(store, "data-000000", [("good", members(clips, 1))] * 2)


def test_packet_tables_are_read_only(dataset):
    with pytest.raises(ValueError, match="read-only"):
        Shard(LocalStorage(dataset), "data-000000").table(1).records["offset"][0] = 1
