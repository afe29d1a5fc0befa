"""What notebooks display of datasets, videos and frames, and what is saved."""

import base64
import io
import re
import sys
import types

import av
import numpy as np
import pytest

import fastvid
from fastvid.errors import ChecksumError, UsageError
from fastvid.format.shard import Shard
from fastvid.videos import pictures
from fastvid.videos.pictures import contact_sheet, encode_picture
from tests.browser import Browser, needs_chromium
from tests.datasets import damage, pack
from tests.makers import read_numbers
from tests.report.tags import Tags

HOSTILE = "<script>alert('\"')</script><img src=http://evil/x onerror=alert()>"


@pytest.fixture(scope="module")
def folder(videos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    names = ("compact", "intra", "vp9")
    samples = [(name, videos.painted(name).data, label) for label, name in enumerate(names)]
    columns = {"split": ["train", "train", "val"], "caption": [HOSTILE, "x" * 5000, None]}
    pack(folder, [samples[:2], samples[2:]], classes=("a", HOSTILE, "c"), columns=columns)
    return folder


def decoded(uri):
    kind, data = re.fullmatch(r"data:(\w+/\w+);base64,(.*)", uri).groups()
    with av.open(io.BytesIO(base64.b64decode(data))) as container:
        return kind, [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def shown(folder):
    dataset = fastvid.open(folder)
    return {
        "dataset": dataset, "video": dataset["compact"], "second": dataset["intra"],
        "frames": dataset["intra"].frames(slice(0, 40, 2)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dataset", "video", "second", "frames"])
def test_html_is_small_self_contained_and_escaped(folder, name):
    html = shown(folder)[name]._repr_html_()
    assert len(html) < 300_000
    tags = Tags(html)
    allowed = "div style span i figure figcaption img table thead tbody tr th td"
    assert {tag for tag, *_ in tags.elements} <= set(allowed.split())
    for tag, attributes, _ in tags.elements:
        assert not [one for one in attributes if one.startswith("on")]
        if tag == "img":
            kind, (picture,) = decoded(attributes["src"])
            assert kind == "image/webp"
            assert picture.shape[0] == 96
            assert picture.std() > 1
    assert len(tags.find("img")) == {"dataset": 2, "frames": 16}.get(name, 8)
    assert "http" not in html.replace("http://evil", ""), "nothing is loaded"
    if name in ("dataset", "video"):
        assert HOSTILE in tags.said


def test_facts_of_a_video_and_frames_are_in_the_html(folder):
    things = shown(folder)
    said = Tags(things["video"]._repr_html_()).said
    for fact in (
        "compact",
        "class a",
        "frames 70",
        "duration 2.8 s",
        "size 160x96",
        "rate 25 fps",
        "h264",
        "split train",
    ):
        assert fact in said, fact
    assert "caption None" not in Tags(fastvid.open(folder)["vp9"]._repr_html_()).said
    assert len(things["second"]._repr_html_()) < 100_000, "a long caption is cut"
    said = Tags(things["frames"]._repr_html_()).said
    assert "frame 300.12" not in said
    assert "frame 281.12 s" in said
    assert "and 4 more frames" in said


def test_the_html_of_a_dataset_counts_its_selection(folder, videos, tmp_path):
    data = videos.painted("compact").data
    facts = {"fps": [25.0] * 14, "width": [160] * 14, "height": [96] * 13 + [80], "duration": [1800.0] * 14}
    columns = facts | {"split": [("train", "val")[n % 2] for n in range(14)]}
    names = tuple(f"class{n:02d}" for n in range(14))
    pack(tmp_path, [[(f"key{n:02d}", data, n) for n in range(14)]], classes=names, columns=columns)
    said = Tags(fastvid.open(tmp_path)._repr_html_()).said
    for fact in ("samples 14", "classes 14", "frames 980", "duration 7 h 0 min", "160x96 93 %, 160x80 7 %",
                 "25 fps 100 %", "in 1 shard", "and 2 more211", "class00110"):  # fmt: skip
        assert fact in said, fact
    half = fastvid.open(tmp_path, split="val", where="height > 80")
    said = Tags(half._repr_html_()).said
    for fact in ("samples 6", "frames 420", "duration 3 h 0 min", "selected of 14 samples", "split val", "height > 80"):
        assert fact in said, fact


def test_html_of_a_dataset_opens_one_shard_and_reads_few_samples(folder, videos, tmp_path, monkeypatch):
    data = videos.painted("intra").data
    pack(tmp_path, [[(f"key{m}{n:02d}", data, 0) for n in range(40)] for m in range(3)])
    opened, read = [], []
    init, reader = Shard.__init__, Shard.reader
    monkeypatch.setattr(
        Shard, "__init__", lambda self, *given, **named: opened.append(given[1]) or init(self, *given, **named)
    )
    monkeypatch.setattr(Shard, "reader", lambda self, row, *given: read.append(row) or reader(self, row, *given))
    fastvid.open(tmp_path)._repr_html_()
    assert opened == ["data-000000"]
    assert read == [2, 7, 12, 17, 22, 27, 32, 37]


def test_html_says_what_cannot_be_decoded(folder, videos, tmp_path):
    data = videos.painted("intra").data
    pack(tmp_path, [[("good", data, 0), ("bad", data, 0)]])
    damage(tmp_path, "bad")
    dataset = fastvid.open(tmp_path)
    for html in (dataset._repr_html_(), dataset["bad"]._repr_html_()):
        assert "packet has checksum" in Tags(html).said
    assert dataset._repr_html_().count("<img") == 1
    with pytest.raises(ChecksumError) as caught:
        dataset["bad"].save(tmp_path / "x.mp4")
    assert caught.value.where["key"] == "bad"
    assert not (tmp_path / "x.mp4").exists()


def test_a_saved_mp4_is_the_samples_own(folder, videos, tmp_path):
    path = fastvid.open(folder)["vp9"].save(tmp_path / "clip.MP4")
    assert path.read_bytes() == videos.painted("vp9").data


def test_a_sheet_has_the_frames_from_left_to_right(folder, tmp_path):
    video = fastvid.open(folder)["intra"]
    frames = video.frames([7, 60, 7, 31, 12])
    path = frames.save(str(tmp_path / "x.png"))
    with av.open(str(path)) as container:
        (sheet,) = (frame.to_ndarray(format="rgb24") for frame in container.decode(video=0))
    # Five frames of 160x96 make rows of two, with white between them and in place of a sixth.
    assert sheet.shape == (3 * 96 + 2 * 4, 2 * 160 + 4, 3)
    cells = [sheet[y : y + 96, x : x + 160] for y in (0, 100, 200) for x in (0, 164)]
    assert read_numbers(np.stack(cells[:5])[..., 1]) == [7, 60, 7, 31, 12]
    assert (np.stack(cells[:5]) == frames.data).all()
    assert (cells[5] == 255).all()
    for thing in (video, fastvid.open(folder)):
        assert thing.save(tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")


def test_a_sheet_is_never_longer_than_2048_pixels():
    rng = np.random.default_rng(0)
    for count, height, width in ((1, 1080, 3000), (64, 240, 320), (1000, 32, 32), (3, 2, 900), (5, 4000, 10)):
        sheet = contact_sheet(rng.integers(0, 255, (count, height, width, 3), dtype=np.uint8))
        assert max(sheet.shape) <= 2048
        assert max(sheet.shape) > 200


def test_other_files_and_places_are_refused(folder, tmp_path):
    things = shown(folder)
    for thing, name, hint in (
        (things["frames"], "x.mp4", ".png or .html"), (things["dataset"], "x", ".png or .html"),
        (things["video"], "x.avi", ".mp4 or .m4a or .png or .html"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"^cannot save") as caught:
            thing.save(tmp_path / name)
        assert hint in caught.value.hint
        assert not (tmp_path / name).exists()
    with pytest.raises(UsageError, match="cannot write the file: No such file") as caught:
        things["frames"].save(tmp_path / "none" / "x.png")
    assert caught.value.hint


def test_show_writes_a_sheet_and_prints_its_path_without_a_notebook(folder, capsys, monkeypatch):
    terminal = types.SimpleNamespace(get_ipython=lambda: object())
    for module in (None, terminal):
        monkeypatch.setitem(sys.modules, "IPython", module)
        for thing in shown(folder).values():
            assert thing.show() is None
            with av.open(capsys.readouterr().out.strip()) as container:
                assert container.streams.video[0].codec_context.name == "png"


def test_show_displays_in_a_notebook_and_plays_a_video(folder, videos, capsys, monkeypatch):
    displayed = []
    module = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel=1),
        display=types.SimpleNamespace(display=displayed.append, HTML=lambda html: html),
    )
    monkeypatch.setitem(sys.modules, "IPython", module)
    things = shown(folder)
    for thing in things.values():
        thing.show()
    assert capsys.readouterr().out == ""
    assert displayed[0] == things["dataset"]._repr_html_()
    assert displayed[3] == things["frames"]._repr_html_()
    ((attributes, _),) = Tags(displayed[1]).find("video")
    source = attributes["src"]
    assert base64.b64decode(source.removeprefix("data:video/mp4;base64,")) == videos.painted("compact").data


def test_jpeg_is_used_without_webp(monkeypatch):
    picture = np.full((16, 32, 3), 200, np.uint8)
    monkeypatch.setattr(pictures, "_ENCODERS", (("no-such-encoder", "webp", "yuv420p", {}), pictures._ENCODERS[1]))
    kind, (seen,) = decoded(encode_picture(picture))
    assert kind == "image/jpeg"
    assert abs(int(seen.mean()) - 200) <= 2


@needs_chromium
def test_html_is_readable_on_any_screen_and_in_the_dark(folder, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        for name, thing in shown(folder).items():
            browser.load(thing.save(tmp_path / f"{name}.html"))
            for width in (1280, 400):
                browser.resize(width)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                ink = browser.evaluate("getComputedStyle(document.querySelector('.facts')).color")
                bright = sum(map(int, re.findall(r"\d+", ink)[:3])) > 380
                assert bright == (scheme == "dark"), "text takes the colour of the page around it"
            assert browser.evaluate("[...document.images].every(one => one.naturalWidth > 60)")
        assert not [url for url in browser.requests() if not url.startswith(("file:", "data:"))]
    finally:
        browser.close()
