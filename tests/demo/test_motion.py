"""In the demo's dataset a single frame does not reveal the direction, and its page needs no network."""

import csv
import re

import numpy as np
import pytest

from fastvid.demo import motion, run
from fastvid.train.run.run_report import RunMetrics

VIDEOS = motion.plan_videos({"train": 2, "test": 1}, seed=3)


def test_labels_are_balanced_and_names_unique():
    per_direction = len(VIDEOS) // len(motion.DIRECTIONS)
    for direction in motion.DIRECTIONS:
        assert sum(video.direction == direction for video in VIDEOS) == per_direction
    assert len({video.name for video in VIDEOS}) == len(VIDEOS)


@pytest.mark.parametrize("texture", motion.TEXTURES)
def test_all_directions_shift_one_picture_from_one_position(texture):
    group = [v for v in VIDEOS if (v.split, v.texture, v.instance) == ("train", texture, 1)]
    assert len(group) == 8
    first = {next(motion.frames(video)).tobytes() for video in group}
    assert len(first) == 1
    picture = next(motion.frames(group[0]))
    ends = set()
    for video in group:
        dy, dx = motion.DIRECTIONS[video.direction]
        for number, frame in enumerate(motion.frames(video)):
            step = motion.SPEED * number
            assert (frame == np.roll(picture, (step * dy, step * dx), axis=(0, 1))).all()
        ends.add(frame.tobytes())
    assert len(ends) == 8, "the texture must look different when it has moved elsewhere"


def test_held_out_textures_are_new_and_depend_on_the_seed():
    def pictures(split, seed):
        videos = motion.plan_videos({split: 2}, seed=seed)
        return {next(motion.frames(video)).tobytes() for video in videos}

    assert not pictures("train", 0) & pictures("test", 0)
    assert not pictures("train", 0) & pictures("train", 1)
    assert len(pictures("train", 0)) == 2 * len(motion.TEXTURES)


def test_annotations_name_every_video(tmp_path):
    path = motion.annotate(tmp_path / "a.csv", VIDEOS)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["path"] for row in rows] == [video.name for video in VIDEOS]
    assert {row["label"] for row in rows} == set(motion.DIRECTIONS)
    assert {int(row["texture"]) for row in rows} == set(range(len(motion.TEXTURES)))


def test_the_page_is_self_contained_and_escapes_names():
    frames = np.zeros((8, 4, 4, 3), np.uint8)
    strip = run.Strip(frames, "<left>", {"TSM": "<left>", "control": "right & up"})
    summary = {
        "tsm_top1": 99.0,
        "control_top1": 12.5,
        "control_texture_top1": 98.0,
        "shuffled_top1": 14.0,
        "chance": 12.5,
        "clips_per_second": 500.0,
        "seconds": 200.0,
        "processes": 2,
    }
    rows = [
        {"kind": "train", "samples": n, "loss": 2.0 / n, "step_ms": 110.0, "wait_percent": 100 / 11} for n in (1, 2)
    ]
    rows += [{"kind": "eval", "samples": n, "top1_percent": 45.0 * n} for n in (1, 2)]
    runs = {title: RunMetrics(title, rows, 1) for title in ("TSM", "<control>")}
    text = run.page(summary, runs, [strip], {"videos": "512"})
    assert "<left>" not in text
    assert "<control>" not in text
    assert "&lt;left&gt;" in text
    outside = [
        u
        for u in re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", text)
        if not u.startswith(("data:", "#"))
    ]
    assert not outside
    assert text.count("<script") == 1  # the kit's own, whose hash its policy names
    for number in ("99.0 %", "12.5 %", "14.0 %", "100 ms", "10 ms", "500 clips/s", "512"):
        assert f">{number}<" in re.sub(r"</?small>", "", text.replace("&#8239;", " ")), number
