"""`fastvid inspect`: the numbers, the page, and its protection against hostile names."""

import base64
import io
import json
import re
from contextlib import closing

import av
import numpy as np
import pyarrow as pa
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.ledger import write_ledger
from fastvid.sharding.page.page import HEIGHT, classes_section, make_contact_sheet, pick_frames, render_page
from fastvid.sharding.page.summary import UNLABELLED, summarize
from tests.browser import Browser, needs_chromium
from tests.datasets import make_clip, pack, recommit
from tests.report.tags import Tags
from tests.sharding.shardtools import make

EVIL = "<script>document.title='pwned'</script>"
QUOTES = "\"onmouseover='document.title=`pwned`' x=\""


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [make_clip(folder / f"{n}.mp4", frames=n, size=s) for n, s in ((12, "96x64"), (30, "64x96"), (1, "96x96"))]


@pytest.fixture
def store(tmp_path, clips):
    """Eight samples in two shards; three classes, one of them empty; two splits; names that contain markup."""
    samples = [(f"c/{n}", clips[n % 3], n % 2) for n in range(8)]
    store = pack(
        tmp_path / "data&set",
        [samples[:5], samples[5:]],
        classes=("jump", EVIL, "empty"),
        columns={
            "split": ["train"] * 5 + ["val"] * 3,
            "split2": [QUOTES] * 8,
            "caption": [f"caption {n} </dl>{EVIL}" for n in range(8)],
        },
    )
    remove_samples(store, ["c/7"])
    rows = [ledger_row(f"c/{n}.avi", key=f"c/{n}", warnings=["enlarged"] if n % 2 else []) for n in range(8)]
    rows += [
        ledger_row(f"{EVIL}.avi", reason="truncated", message=f"ends early {QUOTES}"),
        ledger_row("right\u202eiva.4pm", reason="truncated", message="turned\x1b[2J around"),
        ledger_row("odd.avi", reason=f"later {EVIL}", message="a reason of a later version"),
    ]
    write_ledger(store, rows, {})
    return store


def ledger_row(source, key=None, reason=None, message=None, warnings=()):
    status = "packed" if reason is None else "rejected"
    return {
        "source_id": source, "path": source, "status": status, "reason": reason, "message": message, "key": key,
        "shard": None, "bytes_in": 1000, "bytes_out": 500, "num_frames": 12, "seconds": 0.1, "warnings": list(warnings),
    }  # fmt: skip


class Page(Tags):
    """The elements of a page, by tag and attributes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data.decode("utf-8"))

    def find(self, tag, **attributes):
        return [
            (attrs, "".join(words))
            for name, attrs, words in self.elements
            if name == tag and all(value in attrs.get(key, "").split() for key, value in attributes.items())
        ]


def sources(page):
    return [words for _, words in page.find("tr") if any(end in words for end in (".avi", ".4pm"))]


def render(store, **options):
    return render_page(summarize(store.url), **options)


def printed(dataset, capsys, *options):
    assert main(["inspect", str(getattr(dataset, "url", dataset)), *options]) == 0
    return capsys.readouterr().out


def samples(totals):
    return {value: total.samples for value, total in totals.items()}


class TestSummary:
    def test_counts_visible_samples(self, store):
        summary = summarize(store.url)
        assert (summary.num_samples, summary.removed, summary.generation.number) == (7, 1, 2)
        assert [(c.name, c.count, samples(c.splits)) for c in summary.class_counts] == [
            ("jump", 4, {"train": 3, "val": 1}),
            (EVIL, 3, {"train": 2, "val": 1}),
            ("empty", 0, {}),
        ]
        assert summary.num_frames.tolist() == [12, 30, 1, 12, 30, 1, 12]
        np.testing.assert_allclose(summary.seconds, summary.num_frames / 25)
        assert summary.sizes == {"96x64": 3, "64x96": 2, "96x96": 2}
        assert summary.rates == {"25": 7}
        assert summary.encoding.colours == {"limited smpte170m": 7}
        assert samples(summary.splits["split"]) == {"train": 5, "val": 2}
        assert summary.rejected == {"truncated": 2, f"later {EVIL}": 1}
        assert (summary.sources, summary.encoding.conforming, summary.encoding.whole) == (11, 7, 0)
        assert summary.tar_bytes == sum(store.size(f"data-00000{n}.tar") for n in range(2))
        # GOPs of 8, three droppable frames of four: counted by hand from how the clips were encoded.
        assert summary.encoding.packets_per_key == (3 * 12 + 2 * 30 + 2 * 1) / (3 * 2 + 2 * 4 + 2 * 1)
        assert summary.encoding.arithmetic == 0
        assert [(one.number, one.time) for one in summary.history] == [(n, "2023-11-14T22:13:20Z") for n in (2, 1)]
        assert summarize(store.url, generation=1).num_samples == 8

    def test_hours_are_summed_by_class_and_split(self, store, capsys):
        summary = summarize(store.url)
        first, second, empty = summary.class_counts
        # Frames of samples 0, 2, 4, 6 and 1, 3, 5; sample 7 is removed. 5 and 6 are in the split val.
        assert (first.seconds, second.seconds, empty.seconds) == pytest.approx((55 / 25, 43 / 25, 0))
        assert first.splits == {"train": (3, pytest.approx(43 / 25)), "val": (1, pytest.approx(12 / 25))}
        assert summary.splits["split"]["train"].seconds == pytest.approx(85 / 25)
        numbers = summary.to_json()
        jump = {"samples": 4, "seconds": pytest.approx(2.2), "splits": {"train": 3, "val": 1}}
        assert numbers["classes"]["jump"] == jump
        assert numbers["splits"]["split"]["val"] == {"samples": 2, "seconds": pytest.approx(0.52)}
        out = printed(store, capsys)
        assert "split       train 5 (71 %, 3.4 s), val 2 (29 %, 0.52 s)" in out
        assert re.search(r"jump +█+ 4, 2\.2 s \(train 3, val 1\)", out)

    def test_columns_of_the_sources_are_shown_with_what_is_missing(self, store, capsys):
        table = Dataset(store.url).annotations
        values = pa.array([None, "a dog", None, None, "a dog", "a cat", None, None])
        recommit(store, annotations=table.append_column("words", values).append_column("score", pa.array([0.1] * 8)))
        shown = {one.name: one for one in summarize(store.url).columns}
        assert (shown["words"].missing, shown["words"].examples) == (4, ("a dog", "a cat"))
        assert (shown["score"].kind, shown["score"].missing, shown["score"].examples) == ("double", 0, ("0.1",))
        assert not {"key", "source_id", "fps", "split", "removed"} & set(shown)
        assert "words: string, 57 % missing; a dog, a cat" in printed(store, capsys)

    def test_terminal_text_cannot_move_the_cursor(self, tmp_path, clips, capsys):
        store = pack(tmp_path / "d", [[("a", clips[0], 0)]], classes=("clear\x1b[2J\u202escreen",))
        out = printed(store, capsys)
        assert r"clear\x1b[2J\u202escreen" in out
        assert "\x1b" not in out
        store = pack(tmp_path / "e", [[("a", clips[0], None)]], classes=())
        assert "classes" not in printed(store, capsys), "there is none"

    def test_facts_of_few_shards_are_read_of_a_dataset_with_many(self, tmp_path, clips, capsys, monkeypatch):
        monkeypatch.setattr("fastvid.sharding.page.summary._MOST_SHARDS", 3)
        store = pack(tmp_path / "d", [[(f"s/{n}", clips[n % 2], 0)] for n in range(7)])
        for n in (1, 2, 4, 5):
            store.delete(f"data-00000{n}.parquet")
        summary = summarize(store.url)
        # Shards 0, 3 and 6: clips of 12, 30 and 12 frames.
        assert (summary.encoding.samples, summary.encoding.shards_read, summary.encoding.of) == (3, 3, 7)
        assert summary.num_frames.tolist() == [12, 30, 12, 30, 12, 30, 12]
        assert "bytes per clip, colour, codec and packets are those of 3 of 7 shards" in printed(store, capsys)

    def test_samples_without_label_or_class_are_marked_and_none_at_all_make_a_page(self, store, capsys):
        table = Dataset(store.url).annotations
        labels = [None, 7, *table["label"].to_pylist()[2:]]
        index = table.column_names.index("label")
        recommit(store, annotations=table.set_column(index, table.schema.field(index), pa.array(labels, pa.int32())))
        assert {(c.name, c.count) for c in summarize(store.url).class_counts} >= {(UNLABELLED, 1), ("7", 1)}
        assert re.search(rb"(?s)<main>.*>3 classes, 1 to 3 samples", render(store)), "what has no label is no class"
        assert re.search(r"(?s)classes +4, with 0 to 3.* 7 .*1, 1\.2 s \(train 1\)", printed(store, capsys))
        remove_samples(store, [f"c/{n}" for n in range(8)])
        assert summarize(store.url).num_samples == 0
        page = Page(render(store))
        assert "no sample is visible" in page.find("header")[0][1]
        assert {attrs["id"] for attrs, _ in page.find("section")} == {"sources"}, "nothing is left to show but sources"

    def test_summary_is_printed_on_the_terminal(self, store, capsys):
        out = printed(store, capsys, "--top", "1")
        assert "7 in 2 shards, 1 removed and hidden" in out
        assert "and 2 more; --top N lists N" in out
        assert "11: 8 packed, 3 rejected" in out
        assert "truncated: the data ends earlier than the header says" in out
        numbers = json.loads(printed(store, capsys, "--json"))
        assert (numbers["samples"], numbers["rejected"]["truncated"]) == (7, 2)


class TestPage:
    def test_html_is_well_formed_and_complete(self, store):
        page = Page(render(store))
        titles = {attrs["id"] for attrs, _ in page.find("section")}
        assert titles == {"classes", "clips", "columns", "encoding", "sources"}
        assert len(page.find("div", **{"class": "tile"})) == 7
        assert [words for attrs, words in page.find("h1")] == ["data&set"]
        rows = sources(page)
        assert len(rows) == 11
        assert rows[0].startswith(("truncated", "later"))
        assert rows[-1].startswith("packedc/7.avienlarged")
        assert "0.04 s shortest" in page.find("section", id="encoding")[0][1]

    def test_hostile_names_stay_text(self, store):
        data = render(store)
        page = Page(data)
        assert len(page.find("script")) == 1
        assert EVIL.encode() not in data
        assert EVIL in [words for _, words in page.find("h3")]
        assert any(EVIL in words for _, words in page.find("td"))
        assert sum(EVIL in words for _, words in page.find("dd")) >= 7
        assert not [name for _, attrs, _ in page.elements for name in attrs if name.startswith("on")]
        # Characters that reverse a line or move a cursor are escaped.
        assert "\u202e".encode() not in data
        assert b"right\\u202eiva.4pm" in data
        assert b"turned\\u001b[2J around" in data

    def test_page_has_no_external_references_and_every_link_has_its_target(self, store):
        data = render(store)
        page = Page(data)
        for name, attrs, _ in page.elements:
            for key in ("src", "href", "action", "data", "poster", "srcset"):
                assert attrs.get(key, "#").startswith("#"), (name, key, attrs[key])
        for url in re.findall(rb"url\(([^)]{0,30})", data):
            assert url.startswith((b"data:image/webp;base64,", b'"')), url
        assert not re.findall(rb"@import|<link|<iframe|<img|https?://[^\"']+", data)
        ids = {attrs["id"] for _, attrs, _ in page.elements if "id" in attrs}
        links = {attrs["href"][1:] for attrs, _ in page.find("a") if "href" in attrs}
        assert links
        assert links <= ids

    def test_classes_without_a_clip_have_no_link(self, store):
        sheet = make_contact_sheet(summarize(store.url), max_bytes=10)
        page = Page(classes_section(summarize(store.url), sheet).body.encode())
        assert [attrs for attrs, _ in page.find("a") if "href" in attrs] == []
        assert [words for _, words in page.find("a")] == ["jump", EVIL]

    def test_a_dataset_without_labels_has_no_classes(self, tmp_path, clips):
        page = Page(render(pack(tmp_path / "d", [[("a", clips[0], None), ("b", clips[1], None)]], classes=())))
        assert {attrs["id"] for attrs, _ in page.find("section")} == {"clips", "encoding"}
        assert "Classes" not in [words for _, words in page.find("div", **{"class": "label"})]

    def test_page_stays_within_max_bytes_and_a_long_ledger_is_cut_after_the_rejected_sources(self, store):
        full = render(store)
        frame = len(re.sub(rb"data:image/webp;base64,[^)]*", b"", full))
        assert len(full) <= 8_000_000
        assert len(render(store, max_bytes=max(200_000, frame))) <= 200_000
        with pytest.raises(UsageError, match="is too small"):
            render(store, max_bytes=1000)
        rows = [ledger_row(f"s/{n}.avi", key=f"s/{n}") for n in range(3000)]
        rows += [ledger_row(f"z/{n}.avi", reason="empty", message="the file has no bytes") for n in range(20)]
        write_ledger(store, rows, {})
        data = render(store, max_bytes=400_000)
        page = Page(data)
        listed = sources(page)
        assert len(data) <= 400_000
        assert len(listed) < 3000
        assert [words.startswith("empty") for words in listed[:21]] == [True] * 20 + [False]
        said = " ".join(words for _, words in page.find("p", **{"class": "lead"}))
        assert f"The first {len(listed)} are listed; ledger.parquet contains all." in said

    def test_a_sample_that_does_not_decode_is_counted_not_shown(self, store):
        data = bytearray(store.read("data-000000.tar"))
        position = data.index(b"mdat")
        data[position + 100 : position + 400] = bytes(300)
        store.write("data-000000.tar", bytes(data))
        page = Page(render(store))
        assert len(page.find("div", **{"class": "tile"})) == 6
        assert "1 sample could not be decoded" in page.find("p", **{"class": "more"})[0][1]

    def test_classes_that_do_not_decode_are_not_said_to_lack_space(self, tmp_path, clips):
        store = pack(tmp_path / "d", [[("a", clips[0], 0)]])
        data = bytearray(store.read("data-000000.tar"))
        position = data.index(b"mdat")
        data[position + 100 : position + 400] = bytes(300)
        store.write("data-000000.tar", bytes(data))
        shown = Page(render(store)).find("section", id="clips")[0][1]
        assert "1 sample could not be decoded" in shown
        assert "No space" not in shown
        assert "Point at a clip" not in shown

    def test_inspect_writes_the_page(self, store, tmp_path, capsys):
        out = tmp_path / "page.html"
        assert main(["inspect", store.url, "--html", str(out)]) == 0
        assert out.read_bytes().startswith(b"<!doctype html>")
        assert "page.html" in capsys.readouterr().out
        assert main(["inspect", store.url, "--html", str(tmp_path / "no" / "page.html")]) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_strips_show_the_frames_of_their_sample(store):
    summary = summarize(store.url)
    strip = make_contact_sheet(summary, max_bytes=10_000_000).strips["jump"][0]
    video = fastvid.open(store.url)[summary.annotations["key"][strip.sample].as_py()]
    with av.open(io.BytesIO(base64.b64decode(strip.uri.partition(",")[2]))) as container:
        picture = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert picture.shape == (HEIGHT, strip.frames * strip.width, 3)
    frames = pick_frames(video.num_frames, video.num_frames / 25, 12)
    assert strip.frames == len(frames)
    seen = picture.reshape(HEIGHT, strip.frames, strip.width, 3).mean((0, 2))
    expected = video.frames(frames).data.mean((1, 2))
    np.testing.assert_allclose(seen, expected, atol=6)  # mean colours; WebP at this quality is within 4


def test_every_class_gets_a_strip_before_any_gets_two(store):
    summary = summarize(store.url)
    whole = make_contact_sheet(summary, max_bytes=10_000_000)
    assert {name: len(strips) for name, strips in whole.strips.items()} == {"jump": 4, EVIL: 3}
    room = sum(len(strips[0].uri) + 2000 for strips in whole.strips.values())
    tight = make_contact_sheet(summary, max_bytes=room)
    assert {name: len(strips) for name, strips in tight.strips.items()} == {"jump": 1, EVIL: 1}
    nothing = make_contact_sheet(summary, max_bytes=10)
    assert (nothing.strips, nothing.left_out) == ({}, 2)


@needs_chromium
def test_page_works_in_a_browser(store, tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(render(store))
    with closing(Browser(tmp_path / "profile")) as browser:
        show = browser.evaluate

        def search(field, text):
            show(f"(s => {{ s.value = {text!r}; s.dispatchEvent(new Event('input')) }})"
                 f"(document.querySelector('#{field}'))")  # fmt: skip

        browser.load(path)
        assert show("document.title") == "data&set · fastvid"
        assert show("document.querySelector('#found').textContent") == "11 of 11"
        shown = "[...document.querySelectorAll('#ledger tbody tr')].filter(row => row.offsetHeight > 0).length"
        for text, count in (("truncated", 2), ("ENDS EARLY", 1), ("nowhere", 0)):
            search("find-source", text)
            assert show(shown) == count
        assert show("document.querySelector('#none').offsetHeight > 0")
        search("find-class", "jump")
        assert show("document.querySelectorAll('.group:not([hidden])').length") == 1

        style = "getComputedStyle(document.querySelector('.strip'))"
        assert show(f"{style}.animationName") == "none"
        place = show(
            "(() => { const t = document.querySelector('.tile'); t.scrollIntoView({behavior: 'instant'});"
            " const b = t.getBoundingClientRect(); return JSON.stringify([b.x + b.width / 2, b.y + b.height / 2]) })()"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", **dict(zip("xy", json.loads(place), strict=True)))
        assert show(f"{style}.animationName") == "play"
        picture = (
            "new Promise(done => { const i = new Image(); i.onload = () => done(i.naturalWidth);"
            f" i.onerror = () => done(0); i.src = {style}.backgroundImage.slice(5, -2) }})"
        )
        frames, width = (show(f"+document.querySelector('.tile').style.getPropertyValue('--{name}')") for name in "nw")
        assert show(picture) == frames * width

        show("document.querySelector('.tile').click()")
        assert show("document.querySelector('#clip h3').textContent").startswith("c/")
        assert EVIL in show("document.querySelector('#clip .facts').textContent")
        before = show("getComputedStyle(document.body).backgroundColor")
        show("document.querySelector('#theme').click()")
        assert show("getComputedStyle(document.body).backgroundColor") != before
        browser.resize(400)
        assert show("document.documentElement.scrollWidth") <= 400
        # The whole row of a source is on the screen, and long facts of a clip scroll.
        search("find-source", "")
        right = "Math.max(...[...document.querySelectorAll('#ledger td')].map(e => e.getBoundingClientRect().right))"
        assert 300 < show(right) <= 400
        assert show("getComputedStyle(document.querySelector('#clip')).overflowY") == "auto"

        # Positive control: the policy stops an injected script.
        script = "Object.assign(document.createElement('script'), {textContent: 'document.title = 1'})"
        show(f"document.body.append({script})")
        assert show("document.title") == "data&set · fastvid"
        assert not [url for url in browser.requests() if not url.startswith(("file:", "data:"))]


@pytest.mark.parametrize(("profile", "within"), [("intra", 0.0), ("small", 0.0), ("compact", 0.5)])
def test_a_summary_says_how_many_packets_one_frame_takes(profile, within, tmp_path, capsys):
    make(tmp_path / "raw" / "a.mp4", frames=64, rate="10")
    run_job(str(tmp_path / "raw"), str(tmp_path / "out"), profile=profile, workers=1)
    (table,) = [video.table for video in fastvid.open(tmp_path / "out")]
    taken = np.mean([len(table.plan(np.array([frame])).packets) for frame in range(64)])
    said = re.search(r"^decoding +(\S+) packets for one frame", printed(tmp_path / "out", capsys), re.MULTILINE)
    assert abs(float(said[1]) - taken) <= within
