"""The guarantees state what was measured."""

from __future__ import annotations

from tests.docs.mutated_files import PAGE, written


def test_the_guarantees_say_how_many_damaged_pictures_each_codec_lets_through():
    page = PAGE.read_text()
    assert page == written(page), "run `python -m tests.docs.mutated_files`"
