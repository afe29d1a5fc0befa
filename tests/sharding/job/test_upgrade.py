"""A dataset of fastvid 0.1 is refused by name, and `fastvid index DIR` upgrades it with all that it contains."""

import json
import zlib

import numpy as np
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import FormatError, VersionError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import FACT_FIELDS, PACKET_DTYPE
from fastvid.format.shard import Shard
from fastvid.format.tar import write_tar
from fastvid.sharding.job.index import index_tars, rebuild
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.datasets import make_clip, pack, recommit
from tests.sharding.shardtools import contents

# Format 1, as fastvid 0.1 wrote it.
STREAM_1 = np.dtype(
    [("member_offset", "<u8"), ("member_size", "<u8"), ("first_packet", "<u8"), ("num_packets", "<u4")]
    + [(name, "<u4") for name in ("num_frames", "extradata_offset", "extradata_size", "fps_num", "fps_den")]
    + [("width", "<u2"), ("height", "<u2")]
    + [(name, "u1") for name in ("codec", "range", "matrix", "flags")]
    + [("flow_bound", "<f4"), ("reserved", "<u4")]
)
HEADER_1 = np.dtype(
    [("magic", "S4"), ("major", "<u2"), ("minor", "<u2"), ("num_samples", "<u8")]
    + [(name, "<u4") for name in ("num_streams", "stream_bytes", "packet_bytes", "extradata_bytes")]
    + [("num_packets", "<u8"), ("body_crc32", "<u4"), ("reserved", "<u4")]
)


def pkt_1(shard: Shard) -> bytes:
    rows, extradata, packets = np.zeros(shard.num_samples, STREAM_1), bytearray(), []
    for number, row in enumerate(rows):
        info, table = shard.info(number), shard.table(number)
        row["member_offset"], row["member_size"] = shard.member(number)
        row["first_packet"], row["num_packets"] = sum(map(len, packets)), len(table)
        row["extradata_offset"], row["extradata_size"] = len(extradata), len(info.extradata)
        row["fps_num"], row["fps_den"] = info.fps.numerator, info.fps.denominator
        for name in ("num_frames", "width", "height", "codec", "range", "matrix", "flags"):
            row[name] = int(getattr(info, name))
        extradata += info.extradata
        packets.append(table.records)
    extradata += bytes(-len(extradata) % 8)
    body = rows.tobytes() + bytes(extradata) + b"".join(records.tobytes() for records in packets)
    header = np.zeros(1, HEADER_1)
    header["magic"], header["major"], header["num_samples"], header["num_streams"] = b"FVPK", 1, len(rows), 1
    header["stream_bytes"], header["packet_bytes"] = STREAM_1.itemsize, PACKET_DTYPE.itemsize
    header["extradata_bytes"], header["num_packets"] = len(extradata), sum(map(len, packets))
    header["body_crc32"] = zlib.crc32(body)
    return header.tobytes() + body


def downgrade(store: LocalStorage) -> None:
    for name in store.list():
        if name.endswith(".pkt"):
            store.write(name, pkt_1(Shard(store, name.removesuffix(".pkt"))))
        elif name.endswith(".json"):
            record = json.loads(store.read(name))
            del record["sha256"]
            if name == "dataset.json":
                record["version"] = "1.0"
            store.write(name, json.dumps(record).encode())


def show(url, **options):
    dataset = fastvid.open(url, **options)
    frames = [video.frames(range(len(video))).data.tobytes() for video in dataset]
    return dataset.annotations.to_pylist(), dataset.classes, dataset.dataset_id, repr(dataset), frames


@pytest.fixture
def store(tmp_path):
    """Two generations: the second has other labels and one sample removed."""
    clips = [make_clip(tmp_path / f"{n}.mp4", frames=9 + n) for n in range(4)]
    samples = [(f"c/{n}", clip, n % 2) for n, clip in enumerate(clips)]
    columns = {"split": ["train", "test", "train", "test"], "caption": [f"clip {n}" for n in range(4)]}
    store = pack(tmp_path / "set", [samples[:2], samples[2:]], columns=columns)
    rows = Dataset(store.url).annotations.to_pylist()
    for row in rows:
        row["label"], row["removed"] = 1 - row["label"], row["key"] == "c/1"
    table = Dataset(store.url).annotations
    recommit(store, annotations=type(table).from_pylist(rows, schema=table.schema), classes=("up", "down"))
    return store


def test_a_dataset_of_0_1_is_refused_and_upgraded_with_labels_classes_and_splits(store, capsys):
    before, files = {number: show(store.url, generation=number) for number in (1, 2)}, contents(store)
    downgrade(store)
    with pytest.raises(VersionError, match=r"1\.0 is that of fastvid 0\.1.*dataset\.json") as caught:
        fastvid.open(store.url)
    assert "`fastvid index DIR`" in caught.value.hint
    assert main(["verify", store.url]) != 0
    assert "fastvid index DIR" in capsys.readouterr().err
    assert main(["index", store.url]) == 0
    assert {number: show(store.url, generation=number) for number in (1, 2)} == before
    assert fastvid.open(store.url, split="test").keys.to_pylist() == ["c/3"]
    after = contents(store)
    assert {name for name in after if after[name] != files.get(name)} == {"dataset.json"}, "only the revision counts on"
    assert verify_dataset(store.url, workers=1).ok


def test_an_interrupted_upgrade_is_refused_and_resumes(store):
    before = show(store.url)
    store.write("data-000000.pkt", pkt_1(Shard(store, "data-000000")))
    with pytest.raises(VersionError, match=r"1\.0 is that of fastvid 0\.1.*data-000000\.pkt") as caught:
        fastvid.open(store.url)["c/0"]
    assert "`fastvid index DIR`" in caught.value.hint
    rebuild(store.url, workers=1)
    downgrade(store)
    good = store.read("data-000001.tar")
    store.write("data-000001.tar", good[:-1024] + bytes([1]) * 1024)
    with pytest.raises(FormatError, match=r"not the one .* that the generation lists \[shard=data-000001\]"):
        rebuild(store.url, workers=1)
    with pytest.raises(VersionError):
        fastvid.open(store.url)
    store.write("data-000001.tar", good)
    rebuild(store.url, workers=1)
    assert show(store.url) == before


def test_an_upgrade_adds_the_facts_to_select_by(store):
    """Annotations of 0.1 had no frame rate, size or duration, but could have columns of these names."""
    table = Dataset(store.url).annotations.drop_columns(list(FACT_FIELDS))
    old = table.append_column("duration", [["4 s"] * len(table)]).append_column("size", [["big"] * len(table)])
    recommit(store, annotations=old)
    before, pinned = Dataset(store.url), show(store.url)
    downgrade(store)
    for _ in range(2):
        rebuild(store.url, workers=1)
    after = fastvid.open(store.url)
    assert after.generation.number == before.generation.number + 1, "the second call has nothing to add"
    assert after.column("source_duration").to_pylist() == ["4 s"] * 3
    for video in after:
        row = {name: after.column(name)[after.find(video.key)].as_py() for name in FACT_FIELDS}
        assert row == {
            "fps": float(video.fps), "width": video.width, "height": video.height,
            "duration": video.num_frames / float(video.fps),
        }  # fmt: skip
    assert fastvid.open(store.url, where="duration > 0.4").keys.to_pylist() == ["c/2", "c/3"]
    assert show(store.url, generation=before.generation.number) == pinned, "older generations stay as they were"
    kept = [name for name in old.column_names if name != "duration"]
    assert after.annotations.select(kept).equals(old.select(kept))


def test_a_dataset_of_tars_of_other_tools_is_upgraded(tmp_path):
    clips = [make_clip(tmp_path / f"{n}.mp4", frames=9 + n) for n in range(2)]
    with (tmp_path / "foreign.tar").open("wb") as file:
        write_tar(file, [(f"a{n}", {"mp4": clip, "cls": b"%d" % n}) for n, clip in enumerate(clips)])
    index_tars([str(tmp_path / "foreign.tar")], str(tmp_path / "set"), workers=1)
    store = LocalStorage(tmp_path / "set")
    before = show(store.url)
    downgrade(store)
    rebuild(store.url, workers=1)
    assert show(store.url) == before
    assert before[0][1]["label"] == 1
