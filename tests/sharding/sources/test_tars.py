"""Members of tars that belong to one video: by their names up to the last dot, or by their webdataset key."""

import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.sharding.sources.tars import gather_sources
from tests.sharding.shardtools import ledger, make, tar_of

SHARED = "one of several videos of a key"


def clips(*names):
    """Members of videos, with a label, a caption and fields of their own."""
    own = (("mp4", "video"), ("cls", "{}"), ("txt", "text {}"), ("json", '{{"x": {}}}'))
    return [(f"{name}.{end}", text.format(number)) for number, name in enumerate(names) for end, text in own]


def own(name, number, parent=None, **extra):
    """What such a video gets."""
    shared = {} if parent is None else {"parent": parent}
    return {name: (str(number), {**shared, "caption": f"text {number}", "x": number, **extra})}


# Members, and label and columns of each source by its key; rejected sources have a reason instead.
CASES = {
    "plain": (clips("a/22.0/k0", "a/22.0/k1"), own("a/22_0/k0", 0) | own("a/22_0/k1", 1)),
    "a dot": (clips("v0.clip", "v1.clip"), own("v0", 0) | own("v1", 1)),
    "several": (
        clips("v0.clip0", "v0.clip1", "v0.clip2"),
        {key: one for n in range(3) for key, one in own(f"v0_clip{n}", n, "v0").items()},
    ),
    "dates": (
        [("v.2024-01-02.mp4", b"v"), ("v.2024-01-02.json", '{"x": 2}'), ("v.2024-01-03.mp4", b"v"),
         ("v.2024-01-03.json", '{"x": 3}')],
        {"v_2024-01-02": (None, {"parent": "v", "x": 2}), "v_2024-01-03": (None, {"parent": "v", "x": 3})},
    ),
    "cameras": (
        [("s0.cam_left.mp4", b"v"), ("s0.cam_right.mp4", b"v"), ("s0.json", '{"a": 1}'),
         ("s0.cam_right.json", '{"a": 2, "b": 3}')],
        {"s0_cam_left": (None, {"parent": "s0", "a": 1}), "s0_cam_right": (None, {"parent": "s0", "a": 2, "b": 3})},
    ),
    "numbered": (
        [("s.0.mp4", b"v"), ("s.1.mp4", b"v"), ("s.txt", "both")],
        {"s_0": (None, {"parent": "s", "caption": "both"}), "s_1": (None, {"parent": "s", "caption": "both"})},
    ),
    "beside": (
        [("k.mp4", b"v"), ("k.flow.mp4", b"v"), ("k.meta.json", '{"a": 1}'), ("k.flow.cls", "4"), ("k.cls.txt", "3")],
        {"k": ("3", {"parent": "k", "a": 1}), "k_flow": ("4", {"parent": "k"})},
    ),
    "endings": (
        [("./x/c1.MP4", b"v"), ("./x/c1.Txt", "one"), ("./x/c2.video.mp4", b"v"), ("./x/c2.txt", "two"),
         ("./x/c2.meta.json", '{"a": 1}')],
        {"_/x/c1": (None, {"caption": "one"}), "_/x/c2": (None, {"caption": "two", "a": 1})},
    ),
    "closer": (
        [("k.clip.mp4", b"v"), ("k.cls", "1"), ("k.clip.cls", "2"), ("k.clip.txt", "near"), ("k.txt", "far")],
        {"k": ("2", {"caption": "near"})},
    ),
    "others'": (
        [("k.clip0.mp4", b"v"), ("k.clip1.txt", "no"), ("k.clip1.json", '{"a": 1}'), ("k.clip1.cls", "1")],
        {"k": (None, {})},
    ),
    "no video": ([("k0.mp4", b"v"), ("k1.txt", "words")], {"k0": (None, {}), "k1": "no-video-stream"}),
    "twice": (
        [("k0.mp4", b"v"), ("k0.txt", "zero"), ("k0.mp4", b"w"), ("k0.txt", "one"), ("k1.mp4", b"v")],
        {"k0": (None, {"caption": "zero"}), "k0_mp4_2": "duplicate-name", "k0_txt_2": "duplicate-name",
         "k1": (None, {})},
    ),
    "twice apart": (
        [("k0.mp4", b"v"), ("k1.mp4", b"v"), ("k0.mp4", b"w"), ("k0.txt", "late")],
        {"a/k0": (None, {}), "k1": (None, {}), "k0_mp4_2": "duplicate-name", "a/k0_2": "no-video-stream"},
    ),
    "two formats": ([("k.mp4", b"v"), ("k.webm", b"v")], None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_fields_belong_to_the_video_of_their_name(name, tmp_path):
    members, expected = CASES[name]
    found = gather_sources(tar_of(tmp_path / "a.tar", members)).sources
    videos = [member for member in members if member[0].lower().endswith((".mp4", ".webm"))]
    assert sum(source.member is not None or source.problem is not None for source in found) >= len(videos)
    assert len({source.member for source in found if source.member}) == sum(source.problem is None for source in found)
    if expected is not None:
        got = {
            source.key: source.problem[0].value if source.problem else (source.label, dict(source.columns))
            for source in found
        }
        assert got == expected


def test_what_no_video_takes_and_what_was_shared_is_noted(tmp_path):
    for name, notes in (
        ("others'", [("left aside: clip1.txt", "left aside: clip1.json", "left aside: clip1.cls")]),
        ("numbered", [(SHARED,), (SHARED,)]),
        ("plain", [(), ()]),
    ):
        sources = gather_sources(tar_of(tmp_path / f"{name}.tar", CASES[name][0])).sources
        assert [source.notes for source in sources] == notes, name


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Videos with 5, 6 and 7 frames."""
    folder = tmp_path_factory.mktemp("videos")
    return [make(folder / f"{count}.mp4", size="64x48", frames=count).read_bytes() for count in (5, 6, 7)]


@pytest.mark.parametrize("command", ["index", "shard"])
def test_every_video_of_a_tar_has_a_row_of_the_ledger(command, tmp_path, videos, capsys):
    a, b, c = videos
    tar_of(
        tmp_path / "tars/0.tar",
        [("v.clip0.mp4", a), ("v.clip0.cls", "0"), ("v.clip1.mp4", b), ("v.clip1.cls", "1"), ("w.mp4", c),
         ("w.mp4", a)],
    )  # fmt: skip
    out = tmp_path / "set"
    assert main([command, str(tmp_path / "tars"), "--out", str(out), "--workers", "1"]) == 3
    dataset = fastvid.open(out)
    got = {video.key: (len(video.frames(range(video.num_frames)).data), video.label) for video in dataset}
    assert got == {"v_clip0": (5, 0), "v_clip1": (6, 1), "w": (7, -1)}
    rows = {row["source_id"]: (row["status"], row["reason"], SHARED in row["warnings"]) for row in ledger(out)}
    assert rows == {
        "v.clip0": ("packed", None, True),
        "v.clip1": ("packed", None, True),
        "w": ("packed", None, False),
        "w.mp4#2": ("rejected", "duplicate-name", False),
    }
    assert f"2   {SHARED}" in capsys.readouterr().out
    assert main(["split", str(out), "0.5,0.5", "--seed", "1"]) == 0
    splits = dict(zip(dataset.keys.to_pylist(), fastvid.open(out).column("split").to_pylist(), strict=True))
    assert splits["v_clip0"] == splits["v_clip1"]
    if command == "index":
        assert main(["index", str(out), "--workers", "1"]) == 0
        assert main(["verify", str(out), "--workers", "1"]) == 0
