"""Takedowns: nothing of a source is left, it cannot return, and a receipt proves both; duplicates by hash."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fastvid.cli.main import main
from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import read_generation
from fastvid.format.tar import read_members, write_tar
from fastvid.sharding.change import add as addition
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.change.takedown import (
    SourceSelection,
    audit_removals,
    read_receipts,
    receipt_file,
    steps_left,
    take_down,
)
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.ledger import block, read_blocked
from fastvid.sharding.page.page import render_page
from fastvid.sharding.page.summary import summarize
from fastvid.storage import LocalStorage, open_storage
from tests.sharding.shardtools import contents, copy_files, ffmpeg, ledger, make

SMALL = PROFILES["compact"].changed(short_side=64)
SECRET, COPY = "walk/secret_person.mp4", "jump/hidden_twin.mp4"
CAPTION = "the mayor juggles, très vite"
# What must not be left: names, keys and caption of the source and of its copy.
TOLD = ("secret_person", "hidden_twin", CAPTION)
REASON = "ticket 4711"


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Five videos, one of them long and with a copy under another name, one cut into clips, and a text."""
    folder = tmp_path_factory.mktemp("raw")
    (folder / "walk").mkdir()
    sound = ["-f", "lavfi", "-i", "sine=frequency=440:duration=3", "-f", "lavfi", "-i", "testsrc2=size=96x64:rate=10"]
    ffmpeg(*sound, "-t", "3", "-pix_fmt", "yuv420p", "-preset", "ultrafast", "-c:a", "aac", str(folder / SECRET))
    for number, name in enumerate(("walk/other.mp4", "jump/third.mp4", "jump/film.mp4")):
        make(folder / name, "-preset", "ultrafast", frames=15 + number, rate="10")
    shutil.copy(folder / SECRET, folder / COPY)
    (folder / "jump/text.mp4").write_text("no video")
    (folder / "rows.csv").write_text(f"""path,start,end,label,caption
{SECRET},,,walk,"{CAPTION}"
{COPY},,,jump,someone
walk/other.mp4,,,walk,a street
jump/third.mp4,,,jump,a field
jump/film.mp4,0,0.5,jump,first
jump/film.mp4,0.5,1,jump,second
jump/text.mp4,,,jump,none
""")
    return folder


@pytest.fixture(scope="module")
def arguments(raw):
    return {
        "annotations": f"csv:{raw / 'rows.csv'}", "profile": SMALL, "samples_per_shard": 3, "max_seconds": 1.0,
        "workers": 1, "streams": "rgb,flow", "audio": "aac",
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(raw, arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "set"
    run_job(str(raw), folder, **arguments)
    return folder


@pytest.fixture
def store(made, tmp_path):
    shutil.copytree(made, tmp_path / "set")
    return LocalStorage(tmp_path / "set")


@pytest.fixture(params=["disk", "s3"])
def place(request, made, tmp_path, monkeypatch):
    """The dataset on a disk, and in an object store whose files this machine caches."""
    if request.param == "disk":
        return str(shutil.copytree(made, tmp_path / "set"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("FASTVID_CACHE", str(tmp_path / "cache"))
    url = f"s3://{request.getfixturevalue('s3').bucket()}/set"
    copy_files(LocalStorage(made), open_storage(url))
    return url


def pieces(store, words):
    """64 bytes from the middle of each stored video and sound track whose name contains a word."""
    found = []
    for name in store.list():
        if name.endswith(".tar"):
            view = store.map(name)
            for member in read_members(view):
                if member.suffix not in ("json", "cls", "txt") and any(word in member.name for word in words):
                    middle = member.offset + member.size // 2
                    found.append(bytes(view[middle : middle + 64]))
    return found


def told(folder, terms):
    """Search a folder without the code under test: names of files, raw bytes, and tables as JSON."""
    found = set()
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        content = str(path.relative_to(folder)).encode() + b"\n" + path.read_bytes()
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            content += json.dumps(table.to_pylist(), default=str, ensure_ascii=False).encode()
            content += repr(table.schema.metadata).encode()
        forms = {term: (term, json.dumps(term.decode())[1:-1].encode() if len(term) != 64 else term) for term in terms}
        found |= {(path.name, term) for term, both in forms.items() if any(form in content for form in both)}
    return found


def copied(url, folder):
    copy_files(open_storage(url), LocalStorage(folder))
    return folder


def clean(url):
    compact_shards(open_storage(url))
    collect_garbage(open_storage(url))


def remove(store, *names, **options):
    return take_down(store, SourceSelection(sources=names, **options), reason=REASON)


class TestTakedown:
    def test_leaves_nothing_of_a_source_and_its_copies(self, place, tmp_path, capsys):
        store = open_storage(place)
        terms = [text.encode() for text in TOLD] + pieces(store, ("secret_person", "hidden_twin"))
        assert len(terms) == len(TOLD) + 2 * 3 * 3  # two files, three segments, three streams
        assert {term for _, term in told(copied(place, tmp_path / "before"), terms)} == set(terms)
        before = len(Dataset(place))
        assert main(["remove", place, "--source", SECRET, "--reason", REASON]) == 0
        assert "6 samples removed" in capsys.readouterr().out
        assert len(Dataset(place)) == before - 6
        receipt = ["--receipt", f"{place}/{receipt_file(1)}"]
        names = [word for text in TOLD for word in ("--name", text)]
        assert main(["verify", place, *receipt, *names]) == 1
        assert main(["compact", place]) == 0
        assert main(["gc", place, "--yes"]) == 0
        assert told(copied(place, tmp_path / "after"), terms) == set()
        if (tmp_path / "cache").exists():
            assert told(tmp_path / "cache", terms) == set()
        assert main(["verify", place, *receipt, *names]) == 0
        assert "nothing is found" in capsys.readouterr().out
        assert main(["verify", place]) == 0
        assert len(Dataset(place)) == before - 6

    def test_receipt_says_what_was_removed_by_hash_and_the_audit_which_step_is_missing(self, store, raw):
        digest = hashlib.sha256((raw / SECRET).read_bytes()).hexdigest()
        old = {shard.name: shard.sha256 for shard in read_generation(store)[1].shards}
        done = remove(store, SECRET)
        assert (done.named, done.copies, done.generation) == (1, 1, 2)
        before = contents(store)
        assert remove(store, SECRET).receipt == done.receipt
        assert contents(store) == before
        for step, hint in ((None, "fastvid compact"), (compact_shards, "fastvid gc"), (collect_garbage, None)):
            if step is not None:
                step(store)
            said = [t.found for t in audit_removals(store.url, read_receipts(store)).found if t.file == "receipt 1"]
            assert (hint is None and not said) or hint in said[0]
        (receipt,) = read_receipts(store)
        assert (steps_left(store, receipt), receipt.reason, receipt.samples) == (None, REASON, 6)
        assert [(source.sha256, source.samples) for source in receipt.sources] == [(digest, 6)]
        assert receipt.stored_bytes == receipt.sources[0].bytes > 0
        assert receipt.shards
        assert receipt.shards.items() <= old.items()
        (row,) = [row for row in ledger(store.root) if row["status"] == "removed"]
        assert row["source_id"] == f"removed:{digest[:16]}"
        assert (row["path"], row["key"], row["source_sha256"]) == ("", None, digest)
        assert row["message"] == f"{receipt.time}: {REASON}"
        page = render_page(summarize(store.url)).decode()
        assert "removed:" in page
        assert REASON in page
        assert "secret_person" not in page

    @pytest.mark.parametrize(
        ("selection", "gone", "samples"),
        [
            ({"keys": ["jump/hidden_twin/0001"]}, ("secret", "twin"), 6),
            ({"where": f"caption = '{CAPTION}'"}, ("secret", "twin"), 6),
            ({"sources": [COPY]}, ("secret", "twin"), 6),
            ({"hashes": ["sha"]}, ("secret", "twin"), 6),
            ({"sources": ["jump/film.mp4#0-0.5"]}, ("film",), 2),
        ],
        ids=["keys", "where", "sources", "hashes", "clip"],
    )
    def test_every_way_to_select_a_part_removes_all_of_the_file(self, store, raw, selection, gone, samples):
        if "hashes" in selection:
            selection = {"hashes": [hashlib.sha256((raw / SECRET).read_bytes()).hexdigest()]}
        # Samples that are hidden already go too, and a ledger of an earlier version gets its hashes.
        remove_samples(store, ["walk/secret_person/0000"])
        path = store.root / "ledger.parquet"
        pq.write_table(pq.read_table(path).drop_columns(["source_sha256"]), path)
        assert take_down(store, SourceSelection(**selection), reason=REASON).receipt.samples == samples
        for names in (Dataset(store.url).keys.to_pylist(), [row["source_id"] for row in ledger(store.root)]):
            assert not [name for name in names if any(word in name for word in gone)]
        clean(store.url)
        assert audit_removals(store.url, read_receipts(store), names=gone).ok

    def test_wrong_requests_change_nothing(self, store):
        before = contents(store)
        for selection, reason, message in (
            (SourceSelection(sources=["walk/secret_perso"]), REASON, r"no source is called.*\n.*secret_person"),
            (SourceSelection(sources=[SECRET]), "of secret_person", "a name of what is removed"),
            (SourceSelection(sources=[SECRET]), " ", "the reason is empty"),
            (SourceSelection(hashes=["12"]), REASON, "not a SHA-256"),
            (SourceSelection(keys=["walk/none"]), REASON, "not in the dataset"),
            (SourceSelection(), REASON, "nothing is selected"),
        ):
            with pytest.raises(UsageError, match=message):
                take_down(store, selection, reason=reason)
        for names in ([], ["ab"]):
            with pytest.raises(UsageError):
                audit_removals(store.url, [], names=names)
        assert contents(store) == before

    def test_without_a_reason_samples_are_only_hidden_and_a_rejected_source_loses_its_name(self, store, capsys):
        assert main(["remove", store.url, "--source", SECRET]) == 0
        assert "3 samples removed" in capsys.readouterr().out
        assert not store.exists("blocked.json")
        assert not read_receipts(store)
        assert SECRET in [row["source_id"] for row in ledger(store.root)]
        assert remove(store, "jump/text.mp4").receipt.unknown == 1
        assert told(store.root, [b"jump/text"]) == set()
        assert [row["source_id"] for row in ledger(store.root) if row["status"] == "removed"] == ["removed:unknown-0"]

    def test_two_takedowns_at_once_both_happen(self, store):
        with ThreadPoolExecutor(3) as pool:
            names = (SECRET, "walk/other.mp4", "jump/third.mp4")
            done = list(pool.map(lambda name: remove(LocalStorage(store.root), name), names))
        assert [result.receipt.samples for result in done] == [6, 2, 2]
        assert len(read_blocked(store)) == len(read_receipts(store)) == 3
        clean(store.url)
        assert audit_removals(store.url, read_receipts(store), names=(*TOLD, "walk/other", "jump/third")).ok
        assert [row["status"] for row in ledger(store.root)].count("removed") == 3


class TestReturn:
    def test_same_bytes_under_another_name_are_refused(self, store, raw, arguments, tmp_path):
        remove(store, SECRET)
        clean(store.url)
        assert run_job(str(raw), store.root, **arguments).packed == 4
        add_sources(store.url, str(raw), annotations=arguments["annotations"], workers=1, max_seconds=1.0)
        (receipt,) = read_receipts(store)
        assert audit_removals(store.url, [receipt], names=TOLD).ok
        (tmp_path / "new").mkdir()
        shutil.copy(raw / SECRET, tmp_path / "new/innocent.mp4")
        make(tmp_path / "new/fresh.mp4", "-preset", "ultrafast", frames=11, rate="10")
        done = add_sources(store.url, str(tmp_path / "new"), workers=1)
        assert (done.report.packed, dict(done.report.rejected)) == (1, {"blocked": 1})
        assert told(store.root, [b"innocent", b"secret_person"]) == set()
        assert told(store.root, [b"fresh"])
        # The row of the takedown still says when and why.
        assert [row["message"] for row in ledger(store.root) if row["status"] == "removed"] == [receipt.message]
        (store.root / "blocked.json").write_text("{}")
        for work in (partial(add_sources, store.url, workers=1), partial(run_job, out=store.root, **arguments)):
            with pytest.raises(FormatError, match="block list is damaged"):
                work(sources=str(raw))

    def test_a_file_blocked_while_it_is_added_stays_hidden_and_goes(self, store, raw, tmp_path, monkeypatch):
        make(tmp_path / "new/late_guest.mp4", "-preset", "ultrafast", frames=11, rate="10")
        digest = hashlib.sha256((tmp_path / "new/late_guest.mp4").read_bytes()).hexdigest()
        merge = addition.merge_parts

        def meanwhile(*arguments, **options):
            take_down(store, SourceSelection(hashes=[digest]), reason=REASON)
            return merge(*arguments, **options)

        monkeypatch.setattr(addition, "merge_parts", meanwhile)
        add_sources(store.url, str(tmp_path / "new"), workers=1)
        assert not [key for key in Dataset(store.url).keys.to_pylist() if "guest" in key]
        assert "late_guest.mp4" not in [row["source_id"] for row in ledger(store.root)]
        clean(store.url)
        assert audit_removals(store.url, read_receipts(store), names=["late_guest"]).ok

    def test_the_name_of_a_deleted_shard_that_another_gets_is_no_trace(self, store, raw, tmp_path):
        last = len(read_generation(store)[1].shards) - 1
        dataset = Dataset(store.url)
        shards, _ = dataset.locate(range(len(dataset)))
        keys = [key for key, shard in zip(dataset.keys.to_pylist(), shards.tolist(), strict=True) if shard == last]
        remove(store, keys=keys)
        clean(store.url)
        make(tmp_path / "new/later.mp4", "-preset", "ultrafast", frames=11, rate="10")
        add_sources(store.url, str(tmp_path / "new"), workers=1)
        names = {shard.name for shard in read_generation(store)[1].shards}
        (receipt,) = read_receipts(store)
        assert names & receipt.shards.keys(), "the name was given again"
        assert steps_left(store, receipt) is None
        assert audit_removals(store.url, [receipt]).ok


def test_the_audit_finds_what_is_left(store, tmp_path):
    tars = [name for name in store.list() if name.endswith(".tar")]
    tar = next(name for name in tars if b"secret_person" in bytes(store.map(name)))
    shutil.copy(store.path(tar), tmp_path / "old.tar")
    view = store.map(tar)
    stolen = next(m for m in read_members(view) if "secret_person" in m.name and m.suffix == "mp4")
    video = bytes(view[stolen.offset : stolen.offset + stolen.size])
    remove(store, SECRET)
    clean(store.url)
    receipts = read_receipts(store)
    assert audit_removals(store.url, receipts, names=TOLD).ok
    # A forgotten copy of a shard; a table of the user's, compressed; a list without its hash.
    shutil.copy(tmp_path / "old.tar", store.root / "old.tar")
    (found,) = {trace.file for trace in audit_removals(store.url, receipts).found}
    assert found == "old.tar"
    store.delete("old.tar")
    # One of its videos under another name, without a word of where it comes from.
    with (store.root / "innocent.tar").open("wb") as file:
        write_tar(file, [("harmless", {"mp4": video})])
    assert [trace.found for trace in audit_removals(store.url, receipts).found] == [
        "the bytes of a removed sample, as member 'harmless.mp4'"
    ]
    store.delete("innocent.tar")
    table = Dataset(store.url).annotations.slice(0, 1).select(["key"])
    table = table.append_column("who", [[["x", CAPTION]]])
    pq.write_table(table, store.root / "mine.parquet", compression="zstd", write_statistics=False)
    traces = audit_removals(store.url, receipts, names=[CAPTION]).found
    assert {trace.file for trace in traces} == {"mine.parquet"}
    assert any("column 'who'" in trace.found for trace in traces)
    store.delete("mine.parquet")
    store.delete("blocked.json")
    (trace,) = audit_removals(store.url, receipts).found
    assert trace.file == "blocked.json"


class TestDuplicates:
    def test_are_reported_with_their_original(self, made, store, raw, tmp_path, capsys):
        rows = {row["source_id"]: row for row in ledger(made)}
        assert {name for name, row in rows.items() if "duplicate" in row["warnings"]} == {SECRET}
        assert (rows[SECRET]["message"], rows[SECRET]["status"]) == (f"the same bytes as {COPY}", "packed")
        (tmp_path / "more").mkdir()
        shutil.copy(raw / "walk/other.mp4", tmp_path / "more/again.mp4")
        assert main(["add", store.url, str(tmp_path / "more"), "--workers", "1"]) == 0
        assert "1 source is a copy of another, by SHA-256\nduplicate again.mp4: the same bytes as walk/other.mp4" in (
            capsys.readouterr().out
        )
        assert main(["inspect", store.url]) == 0
        assert "2 duplicate: the same bytes as an earlier source" in capsys.readouterr().out

    def test_added_copies_can_be_dropped(self, store, raw, tmp_path):
        (tmp_path / "more").mkdir()
        shutil.copy(raw / "walk/other.mp4", tmp_path / "more/a.mp4")
        make(tmp_path / "more/b.mp4", "-preset", "ultrafast", frames=12, rate="10")
        shutil.copy(tmp_path / "more/b.mp4", tmp_path / "more/c.mp4")
        done = add_sources(store.url, str(tmp_path / "more"), workers=1, drop_duplicates=True)
        assert {row["source_id"]: row["status"] for row in done.report.ledger.to_pylist()} == {
            "a.mp4": "removed", "b.mp4": "packed", "c.mp4": "removed",
        }  # fmt: skip
        assert [key for key in Dataset(store.url).keys.to_pylist() if "/" not in key] == ["b"]

    def test_indexed_tars_report_copies_and_refuse_blocked_videos(self, raw, tmp_path):
        import tarfile

        (tmp_path / "tars").mkdir()
        with tarfile.open(tmp_path / "tars/00000.tar", "w") as tar:
            for number, name in enumerate(("walk/other.mp4", "jump/third.mp4", "walk/other.mp4")):
                tar.add(raw / name, f"{number:05d}.mp4")
        report = index_tars([str(tmp_path / "tars")], str(tmp_path / "one"), workers=1)
        assert (report.packed, report.duplicates) == (3, 1)
        block(LocalStorage(tmp_path / "two"), [hashlib.sha256((raw / "walk/other.mp4").read_bytes()).hexdigest()])
        report = index_tars([str(tmp_path / "tars")], str(tmp_path / "two"), workers=1)
        assert (report.packed, dict(report.rejected)) == (1, {"blocked": 1})
        assert Dataset(str(tmp_path / "two")).annotations.num_rows == 1  # not indexed and hidden afterwards
        store = LocalStorage(tmp_path / "one")
        assert take_down(store, SourceSelection(keys=["00000"]), reason=REASON).receipt.samples == 2
        with pytest.raises(UsageError, match="tars of another tool, which are never rewritten"):
            compact_shards(store)
