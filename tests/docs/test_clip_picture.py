"""The picture of a clip's path is as drawn, and names the stages as the statistics do."""

from __future__ import annotations

from fastvid.load.workers.stats import Counters
from tests.docs import clip_picture


def test_the_committed_pictures_are_those_that_the_script_draws():
    for file, text in clip_picture.files().items():
        assert file.read_text() == text


def test_the_stages_of_the_picture_are_counted_under_their_names():
    named = {stage.counter for _, stages in clip_picture.LANES for stage in stages} - {""}
    assert named == {"fetch", "decode", "finish"}
    assert {f"{name}_seconds" for name in named} <= set(Counters().as_dict())
