"""The pictures are as drawn, and name stages and rooms as the code does."""

from __future__ import annotations

from fastvid.load.stats import Counters
from tests.docs import pictures
from tests.test_package import ORDER


def test_the_committed_pictures_are_those_that_the_script_draws():
    for file, text in pictures.files().items():
        assert file.read_text() == text, "run `python -m tests.docs.pictures`"


def test_the_stages_of_the_picture_are_counted_under_their_names():
    named = {stage.counter for _, stages in pictures.CLIP_PATH for stage in stages} - {""}
    assert named == {"fetch", "decode", "finish"}
    assert {f"{name}_seconds" for name in named} <= set(Counters().as_dict())


def test_the_rooms_of_the_picture_are_those_of_the_package_in_the_order_of_their_imports():
    assert [room.name for _, rooms in pictures.ROOMS for room in rooms] == ORDER["fastvid"][::-1]
