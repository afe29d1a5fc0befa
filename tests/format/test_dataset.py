"""Shards, sidecars, generations and selections on disk."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from fractions import Fraction

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations import annotation_table
from fastvid.format.dataset import Dataset, Generation, ShardRecord, commit_generation, read_generation
from fastvid.format.schema import KEY_PATTERN, StreamFlag, check_key
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members, wds2idx, write_tar
from fastvid.format.writing import index_shard, sample_members, write_shard
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.storage import LocalStorage

FFMPEG = find_ffmpeg().path


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for name, frames in (("long", 40), ("short", 7)):
        source = f"testsrc2=s=96x64:r=25:d={frames / 25}"
        command = [FFMPEG, "-v", "error", "-f", "lavfi", "-i", source, "-c:v", "libx264", "-threads", "1"]
        subprocess.run([*command, "-pix_fmt", "yuv420p", str(folder / f"{name}.mp4")], check=True)
    return {path.stem: path.read_bytes() for path in folder.glob("*.mp4")}


def members(clips, number):
    meta = {"source_id": f"videos/{number}.avi", "conforms": True, "fps": "25"}
    return sample_members(meta, {"rgb": clips["short" if number % 3 else "long"]})


def build(folder, clips, shards=3, samples=4):
    store, records, rows = LocalStorage(folder), [], []
    for index in range(shards):
        numbers = range(index * samples, (index + 1) * samples)
        digest = write_shard(store, f"data-{index:06d}", [(f"c/{n:03d}", members(clips, n)) for n in numbers])
        records.append(ShardRecord(f"data-{index:06d}", digest.bytes, digest.sha256, digest.samples))
        rows += [
            {
                "key": f"c/{n:03d}",
                "source_id": f"videos/{n}.avi",
                "label": n % 2,
                "num_frames": 7 if n % 3 else 40,
                "removed": n == 5,
                "split": "train" if n % 4 else "val",
                "split2": "test" if n < 6 else "train",
                "caption": f"clip {n}",
            }
            for n in numbers
        ]
    commit_generation(store, "id", Generation(1, tuple(records), classes=("left", "right")), annotation_table(rows))
    return store, rows, records


@pytest.fixture
def dataset(tmp_path, clips):
    build(tmp_path / "d", clips)
    return tmp_path / "d"


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its file open
def test_webdataset_and_duckdb_read_what_was_written(dataset, clips):
    samples = list(webdataset.WebDataset(str(dataset / "data-000001.tar"), shardshuffle=False))
    assert [s["__key__"] for s in samples] == [f"c/{n:03d}" for n in range(4, 8)]
    assert all(s["mp4"] == members(clips, n)["mp4"] for n, s in zip(range(4, 8), samples, strict=True))
    assert json.loads(samples[0]["json"])["source_id"] == "videos/4.avi"
    found = duckdb.sql(f"select key, num_frames from '{dataset}/data-*.parquet' where num_frames > 20 order by key")
    assert found.fetchall() == [(f"c/{n:03d}", 40) for n in range(0, 12, 3)]


def test_pkt_and_parquet_match_the_tar(dataset):
    store = LocalStorage(dataset)
    shard = Shard(store, "data-000002")
    shard.check()
    facts = pq.read_table(dataset / "data-000002.parquet").to_pylist()
    tar = store.map("data-000002.tar")
    for row, fact in enumerate(facts):
        offset, size = shard.member(row)
        assert (fact["member_offset"], fact["member_size"]) == (offset, size)
        assert bytes(tar[offset + 4 : offset + 8]) == b"ftyp"
        info, table = shard.info(row), shard.table(row)
        assert info.fps == Fraction(25)
        assert info.flags & StreamFlag.CONFORMS
        assert fact["num_frames"] == info.num_frames == table.num_frames
        assert fact["extradata"] == info.extradata
        for record in table.records:
            assert record["offset"] + record["size"] <= size


@pytest.mark.parametrize("suffix", ["idx", "parquet", "pkt"])
def test_index_rebuilds_identical_sidecar_when_lost(dataset, suffix):
    path = dataset / f"data-000001.{suffix}"
    before = path.read_bytes()
    path.unlink()
    index_shard(LocalStorage(dataset), "data-000001")
    assert path.read_bytes() == before


def test_idx_is_identical_to_that_of_dali_wds2idx(dataset):
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    out = dataset / "expected.idx"
    subprocess.run([sys.executable, "-m", "wds2idx", "data-000000.tar", str(out)], cwd=dataset, check=True, timeout=300)
    assert out.read_bytes() == (dataset / "data-000000.idx").read_bytes()


def test_dali_reads_tars_through_our_idx(dataset, clips):
    fn = pytest.importorskip("nvidia.dali.fn", reason="DALI is not installed")
    from nvidia.dali import pipeline_def

    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def read():
        return tuple(
            fn.readers.webdataset(
                paths=[str(dataset / "data-000001.tar")],
                index_paths=[str(dataset / "data-000001.idx")],
                ext=["mp4", "json"],
            )
        )

    pipeline = read()
    pipeline.build()
    videos, metas = pipeline.run()
    for row, number in enumerate(range(4, 8)):
        assert bytes(np.asarray(videos.at(row))) == members(clips, number)["mp4"]
        assert json.loads(bytes(np.asarray(metas.at(row))))["source_id"] == f"videos/{number}.avi"


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


def test_generation_is_pinned(dataset):
    store = LocalStorage(dataset)
    dataset_id, first = read_generation(store)
    rows = Dataset(str(dataset)).annotations.to_pylist()
    changed = annotation_table([row | {"label": 1 - row["label"]} for row in rows])
    commit_generation(store, dataset_id, Generation(2, first.shards, classes=first.classes), changed)
    assert (Dataset(str(dataset)).labels == 1 - Dataset(str(dataset), generation=1).labels).all()


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
