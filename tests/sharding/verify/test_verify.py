"""`fastvid verify`: each check detects its kind of damage, and a clean dataset passes."""

import io
import json
import os
import pickle
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastvid.cli.main import main
from fastvid.errors import FormatError, UsageError, error_to_json
from fastvid.format.dataset import Dataset
from fastvid.format.schema import PKT_HEADER_DTYPE, PacketFlag
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members
from fastvid.format.writing import index_shard
from fastvid.media.checks import CHECKS
from fastvid.runtime import faults
from fastvid.runtime.processes import pack as pack_message
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.verify import checks
from fastvid.sharding.verify.verify import repair_sidecars, verify_dataset
from tests.datasets import COMPACT, edit_pkt, make_clip, pack, recommit
from tests.makers import TAGS
from tests.sharding.shardtools import stub, turn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def clips(folder):
    return [make_clip(folder / f"{frames}.mp4", frames=frames) for frames in (12, 17)]


@pytest.fixture
def store(tmp_path, clips):
    """Two shards of three samples, keys c/0 to c/5, of 12 or 17 frames."""
    return pack(tmp_path / "d", [[(f"c/{n}", clips[n % 2], n % 2) for n in range(3 * s, 3 * s + 3)] for s in range(2)])


def found(store, **options):
    report = verify_dataset(store.url, workers=1, **options)
    return {(problem.check, problem.shard, problem.key) for problem in report.problems}


def flip(store, name, position):
    data = bytearray(store.read(name))
    data[position] ^= 0x01
    store.write(name, bytes(data))


def flip_packet(store, stem, key, number):
    """Flip a bit near the end of a packet of a sample, the first of its shard."""
    record = Shard(store, stem).table(0).records[number]
    at = member(store, stem, key).offset + int(record["offset"]) + int(record["size"]) - 2
    flip(store, f"{stem}.tar", at)


def member(store, stem, key, suffix="mp4"):
    return next(m for m in read_members(store.map(f"{stem}.tar")) if (m.key, m.suffix) == (key, suffix))


def edit_parquet(store, name, change):
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(pa.BufferReader(store.read(name)))), sink)
    store.write(name, sink.getvalue())


def set_column(name, index, value):
    def change(table):
        values = table[name].to_pylist()
        values[index] = value
        return table.set_column(
            table.column_names.index(name), table.schema.field(name), pa.array(values, table[name].type)
        )

    return change


def test_a_clean_dataset_passes_every_check(store):
    seen = []
    report = verify_dataset(store.url, workers=1, progress=lambda count, total: seen.append((count, total)))
    assert report.ok, report.problems
    assert (report.samples, report.total) == (6, 6)
    # No video is outside the tars, and the clips have no audio and no signals.
    expected = {"tar": 2, "files": 0, "idx": 2, "parquet": 2, "pkt": 2, "process": 0, "audio": 0, "signals": 0}
    assert {name: report.checked[name] for name in CHECKS} == dict.fromkeys(CHECKS, 6) | expected
    assert seen == [(3, 6), (3, 6)]


def test_removed_samples_are_verified_too(store):
    remove_samples(store, ["c/1"])
    flip(store, "data-000000.tar", member(store, "data-000000", "c/1").offset + 4000)
    assert ("packets", "data-000000", "c/1") in found(store)


def rewritten(name, change):
    return lambda store: store.write(name, change(bytes(store.read(name))))


def padding(store):
    """Flip a bit behind the JSON of the first sample: no sidecar and no frame depends on it."""
    at = member(store, "data-000000", "c/0", "json")
    flip(store, "data-000000.tar", at.offset + at.size + 1)


def of_another(store):
    clip = bytes(store.map("data-000000.tar")[member(store, "data-000000", "c/0").offset :])
    other = pack(Path(store.url) / "other", [[("x", clip[: member(store, "data-000000", "c/0").size], 0)]])
    store.write("data-000000.pkt", other.read("data-000000.pkt"))


@pytest.mark.parametrize(
    ("damage", "check", "shard"),
    [
        (padding, "tar", 0),
        (rewritten("data-000001.tar", lambda data: data + bytes(512)), "tar", 1),
        (rewritten("data-000001.tar", lambda data: data[:700]), "tar", 1),
        (lambda store: store.delete("data-000000.tar"), "tar", 0),
        (lambda store: store.delete("data-000001.idx"), "idx", 1),
        (lambda store: store.delete("data-000001.parquet"), "parquet", 1),
        (lambda store: store.delete("data-000001.pkt"), "pkt", 1),
        (rewritten("data-000000.idx", lambda data: data.replace(b"mp4 ", b"mp4 1", 1)), "idx", 0),
        (rewritten("data-000000.idx", lambda data: data + b"x\n"), "idx", 0),
        (rewritten("data-000001.parquet", lambda data: b"PAR1"), "parquet", 1),
        (lambda store: edit_parquet(store, "data-000000.parquet", lambda table: table.slice(0, 2)), "parquet", 0),
        (lambda store: flip(store, "data-000000.pkt", PKT_HEADER_DTYPE.itemsize + 40), "pkt", 0),
        (of_another, "pkt", 0),
    ],
)
def test_damage_of_one_file_is_found_and_blamed_on_it(store, damage, check, shard):
    damage(store)
    assert found(store) == {(check, f"data-00000{shard}", "")}


def test_wrong_facts_are_found(store):
    edit_parquet(store, "data-000001.parquet", set_column("width", 1, 640))
    (problem,) = verify_dataset(store.url, workers=1).problems
    assert (problem.check, problem.shard, problem.key) == ("parquet", "data-000001", "c/4")
    assert problem.message == "width is 640, but 96 in the tar"


class TestIndex:
    def test_packets_that_differ_from_their_checksums_are_found(self, store):
        def change(streams, packets):
            packets["crc32"][int(streams["first_packet"][2]) + 3] ^= 1

        edit_pkt(store, "data-000000", change)
        flip_packet(store, "data-000001", "c/3", 4)
        problems = verify_dataset(store.url, workers=1).problems
        assert [(problem.check, problem.key, problem.stream, problem.message) for problem in problems] == [
            ("packets", "c/2", "rgb", "1 of 12 packets differ from their checksums: 3"),
            ("tar", "", "", "tar differs from its SHA-256"),
            ("packets", "c/3", "rgb", "1 of 17 packets differ from their checksums: 4"),
        ]

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("width", 112, "width is 112, but 96 in the tar"),
            ("fps_num", 30, "fps is 30, but 25 in the tar"),
            ("member_offset", 512, r"member is indexed at 512\+"),
            ("codec", 250, "250 is not a valid Codec"),
            ("fps_den", 0, "index row is broken"),
            ("num_packets", 11, "11 packets are indexed, the tar contains 12|index row is broken"),
        ],
    )
    def test_wrong_stream_row_is_found(self, store, field, value, message):
        def change(streams, packets):
            streams[field][0] = value

        edit_pkt(store, "data-000000", change)
        problems = [p for p in verify_dataset(store.url, workers=1).problems if p.check == "index"]
        assert [(p.shard, p.key) for p in problems] == [("data-000000", "c/0")]
        assert re.search(message, problems[0].message), problems[0].message

    @pytest.mark.parametrize("kind", ["droppable", "plan"])
    def test_wrong_flags_and_frames_in_the_index_are_found(self, store, kind):
        def change(streams, packets):
            rows = packets[: int(streams["num_packets"][0])]
            if kind == "droppable":  # the last referenced packet of the first GOP: a plan would leave it out
                rows["flags"][np.flatnonzero(rows["flags"] == 0)[0]] |= PacketFlag.DROPPABLE
            else:  # packets and checksums are right, but two planned frames are swapped
                last, other = (np.flatnonzero(rows["frame"] == frame)[0] for frame in (11, 10))
                rows["frame"][last], rows["frame"][other] = 10, 11

        edit_pkt(store, "data-000000", change)
        problems = {p.check: p for p in verify_dataset(store.url, workers=1).problems}
        assert {p.key for p in problems.values()} == {"c/0"}
        assert problems["index"].message.startswith(f"{1 if kind == 'droppable' else 2} packets are indexed wrongly")
        assert kind == "droppable" or "plan" in problems

    @pytest.mark.parametrize(("suffix", "mark"), [("mp4", b"stsz"), ("json", b"{")])
    def test_a_sample_that_cannot_be_indexed_is_found_and_the_others_are_checked(self, store, suffix, mark):
        at = member(store, "data-000000", "c/1", suffix)
        flip(store, "data-000000.tar", bytes(store.read("data-000000.tar")).index(mark, at.offset))
        problems = verify_dataset(store.url, workers=1).problems
        assert {(p.check, p.key) for p in problems} == {("tar", ""), ("parquet", ""), ("index", "c/1")}
        assert suffix == "mp4" or any("cannot parse the sample's JSON" in p.message for p in problems)


class TestPromises:
    """Shards whose files are consistent, but break the promises of a profile."""

    def check(self, tmp_path, clips, data):
        store = pack(tmp_path / "d", [[("good", clips[0], 0), ("bad", data, 1)]])
        problems = verify_dataset(store.url, workers=1).problems
        assert not [problem for problem in problems if problem.key != "bad"]
        return {problem.check: problem.message for problem in problems}

    @pytest.mark.parametrize(
        ("options", "check", "message"),
        [
            (
                {"filters": "setpts='if(gt(N,5),N+3,N)/25/TB'"},
                "timing", r"the frame rate is not constant: frame 6 lasts",
            ),
            ({"arguments": f"{COMPACT} -output_ts_offset 0.2 -use_editlist 0"}, "timing", r".*after the start"),
            ({"size": "90x64"}, "shape", r"90x64 pixels are not multiples of 16$"),
            ({"filters": "setsar=4/3"}, "shape", r"pixels are 4/3 times as wide as high$"),
            (
                {"tags": TAGS.replace("smpte170m", "bt709")},
                "colour", r"the container is tagged limited range, bt709 matrix|frame 0 is tagged",
            ),
            ({"tags": "null"}, "colour", r"the container is tagged unknown range|frame 0 is tagged"),
            (
                {"arguments": f"{COMPACT} -bsf:v h264_metadata=video_full_range_flag=1"},
                "colour", r"frame 0 is tagged full range, smpte170m matrix$",
            ),
            ({"arguments": f"{COMPACT} -pix_fmt yuv422p"}, "colour", r"frame 0 is yuv422p$"),
        ],
    )  # fmt: skip
    def test_a_broken_promise_is_found(self, tmp_path, folder, clips, options, check, message):
        problems = self.check(
            tmp_path, clips, make_clip(folder / f"{zlib.crc32(repr(options).encode())}.mp4", **options)
        )
        assert set(problems) == {check}
        assert re.match(message, problems[check]), problems

    def test_another_rate_and_rotated_pictures_are_found(self, tmp_path, folder, clips):
        store = pack(tmp_path / "rate", [[("bad", clips[0], 1)]], meta={"fps": "30"})
        (problem,) = verify_dataset(store.url, workers=1).problems
        assert (problem.check, problem.message) == ("timing", "12800/512 frames a second, but 30 are promised")
        problems = self.check(tmp_path, clips, turn(folder / "12.mp4", folder / "turned.mp4").read_bytes())
        assert set(problems) == {"shape"}
        assert problems["shape"].startswith("frame 0 has a display rotation of ")

    def test_undecodable_frames_are_found(self, tmp_path, clips):
        # Zeros in the second half of an I frame, written before packing: every checksum is right.
        data = bytearray(clips[0])
        store = pack(tmp_path / "probe", [[("bad", clips[0], 0)]])
        record = Shard(store, "data-000000").table(0).records[0]
        start, size = int(record["offset"]), int(record["size"])
        data[start + size // 2 : start + size] = bytes(size - size // 2)
        assert "decode" in self.check(tmp_path, clips, bytes(data))

    def test_stream_without_promises_has_no_problems(self, tmp_path, folder):
        clips = [
            make_clip(folder / "odd.mp4", size="90x64"),
            make_clip(folder / "709.mp4", tags=TAGS.replace("smpte170m", "bt709")),
            make_clip(folder / "422.mp4", arguments=f"{COMPACT} -pix_fmt yuv422p"),
        ]
        store = pack(tmp_path / "d", [[(f"k{n}", clip, 0) for n, clip in enumerate(clips)]], meta={"conforms": False})
        report = verify_dataset(store.url, workers=1)
        assert report.ok, report.problems
        assert (report.checked["timing"], report.checked["plan"]) == (0, 3)


class TestAnnotations:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda store: edit_parquet(store, "annotations-000001.parquet", set_column("label", 0, 1)),
            lambda store: store.write("annotations-000001.parquet", b"nothing"),
            lambda store: store.delete("annotations-000001.parquet"),
        ],
        ids=["changed", "unparsable", "missing"],
    )
    def test_a_wrong_annotations_file_is_found(self, store, damage):
        damage(store)
        assert found(store) == {("annotations", "", "")}

    def test_rows_of_other_samples_are_found(self, store):
        table = Dataset(store.url).annotations
        recommit(store, annotations=table.take([1, 0, 2, 3, 4, 5]))
        problems = verify_dataset(store.url, workers=1).problems
        assert {(p.check, p.shard, p.key) for p in problems} == {
            ("annotations", "data-000000", f"c/{n}") for n in (0, 1)
        }
        assert "key is 'c/1', in the shard 'c/0'" in {p.message for p in problems}

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("num_frames", 99, "frames is 99, in the shard 12"),
            ("source_id", "x.avi", "source is 'x.avi', in the shard 'c/0.avi'"),
            ("label", 7, "label 7 is not one of the 2 classes"),
        ],
    )
    def test_impossible_values_are_found(self, store, column, value, message):
        recommit(store, annotations=set_column(column, 0, value)(Dataset(store.url).annotations))
        (problem,) = verify_dataset(store.url, workers=1).problems
        assert (problem.check, problem.key, problem.message) == ("annotations", "c/0", message)


def test_a_sample_checks_the_requested_number_and_the_files_of_every_shard(store):
    report = verify_dataset(store.url, sample=4, workers=1)
    assert report.ok
    assert (report.samples, report.checked["index"], report.checked["tar"]) == (4, 4, 0)
    assert verify_dataset(store.url, sample=99, workers=1).samples == 6
    for wrong in ({"sample": 0}, {"sample": 1, "seed": -1}):
        with pytest.raises(UsageError, match="expected at least"):
            verify_dataset(store.url, **wrong)
    store.delete("data-000000.tar")
    store.delete("data-000001.idx")
    seen = [found(store, sample=1, seed=seed) for seed in range(6)]
    assert all(("tar", "data-000000", "") in one for one in seen)
    assert any(("idx", "data-000001", "") in one for one in seen)


class TestRepair:
    def test_repaired_sidecars_equal_the_originals(self, store):
        before = {name: store.read(name) for name in store.list("data-")}
        edit_pkt(store, "data-000000", lambda streams, packets: packets["flags"].fill(3))
        store.delete("data-000000.idx")
        edit_parquet(store, "data-000001.parquet", set_column("width", 1, 640))
        report = verify_dataset(store.url, workers=1)
        assert repair_sidecars(store.url, report) == ("data-000000", "data-000001")
        assert {name: store.read(name) for name in store.list("data-")} == before
        assert verify_dataset(store.url, workers=1).ok

    def test_a_damaged_tar_keeps_its_sidecars(self, store):
        """Positive control: sidecars made from the damaged tar would hide the damage."""
        flip_packet(store, "data-000001", "c/3", 4)
        before = store.read("data-000001.pkt")
        report = verify_dataset(store.url, workers=1)
        assert repair_sidecars(store.url, report) == ()
        assert store.read("data-000001.pkt") == before
        index_shard(store, "data-000001")
        assert ("packets", "data-000001", "c/3") not in found(store)


class TestProcesses:
    def test_several_processes_find_the_same_as_one(self, store):
        def change(streams, packets):
            packets["crc32"][0] ^= 1

        edit_pkt(store, "data-000001", change)
        one, two = (verify_dataset(store.url, workers=workers) for workers in (1, 2))
        assert one.problems == two.problems
        assert one.checked == two.checked

    def test_processes_end_when_a_verification_is_broken_off(self, store, monkeypatch):
        started = []

        class Recorded(checks.Child):
            def __init__(self, module):
                super().__init__(module)
                started.append(self._process)

        def stop(_done, _total):
            raise KeyboardInterrupt

        monkeypatch.setattr(checks, "Child", Recorded)
        with pytest.raises(KeyboardInterrupt):
            verify_dataset(store.url, workers=2, progress=stop)
        assert started
        assert all(process.poll() is not None for process in started)

    def test_dead_process_is_reported_and_affects_only_its_task(self, store, monkeypatch):
        monkeypatch.setenv(faults.VARIABLE, "check data-000001")
        report = verify_dataset(store.url, workers=2)
        assert [(p.check, p.shard) for p in report.problems] == [("process", "data-000001")]
        assert report.problems[0].message == "the process that checked rows 0 to 2 died"
        assert report.samples == 3


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


class TestHostileProcesses:
    """A process that decodes damaged shards may be compromised: its messages are data, or it counts as dead."""

    @pytest.fixture
    def send(self, tmp_path, monkeypatch):
        """Replace the interpreter by a program that sends some bytes and waits."""

        def send(data):
            (tmp_path / "data").write_bytes(data)
            program = stub(tmp_path / "python", f"cat {tmp_path}/data; exec sleep 600")
            monkeypatch.setattr(sys, "executable", program)

        return send

    @pytest.mark.parametrize("sent", ["pickle", "another check", "an answer too many"])
    def test_malformed_findings_lose_one_task_and_run_no_code(self, store, sent, tmp_path, send):
        exploded = tmp_path / "exploded"
        bomb = pickle.dumps(Bomb(exploded))
        fine = {"problems": [], "checked": {}, "facts": {}, "samples": 3}
        other = pack_message({**fine, "problems": [("other", "nonsense", "", "", "")]})
        send({"pickle": bomb, "another check": other, "an answer too many": 2 * pack_message(fine)}[sent])
        report = verify_dataset(store.url, workers=2)
        assert [(p.check, p.shard) for p in report.problems] == [("process", f"data-00000{n}") for n in range(2)]
        assert not exploded.exists()
        pickle.loads(bomb)  # the control
        assert exploded.exists()

    def test_an_error_that_ends_a_check_reaches_the_caller(self, store, send):
        send(pack_message({"error": error_to_json(FormatError("cannot be opened", file="x"))}))
        with pytest.raises(FormatError, match=r"cannot be opened \[file=x\]"):
            verify_dataset(store.url, workers=2)


def test_the_command_prints_a_table_or_json_repairs_and_sets_the_exit_code(store, capsys):
    assert main(["verify", store.url, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 of 6 samples decoded" in out
    assert out.strip().endswith("nothing is wrong")
    store.delete("data-000001.idx")
    assert main(["verify", store.url, "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "idx: data-000001: file does not exist" in out
    assert out.strip().endswith("1 problem")
    assert main(["verify", store.url, "--json", "--workers", "1"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["checks"]["idx"]) == (False, {"checked": 2, "problems": 1})
    assert report["problems"][0]["shard"] == "data-000001"
    assert main(["verify", store.url, "--repair", "--json", "--workers", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["repaired"]) == (True, ["data-000001"])
