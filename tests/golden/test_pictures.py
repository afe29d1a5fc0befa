"""Batches contain the recorded frames and flow, in every form: threads, processes, views, clips per video."""

import pytest

from tests.golden import golden, pictures

RECORDED = golden.read(pictures.NAME)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return pictures.cases(tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_batch_contains_the_recorded_pictures(cases, name):
    golden.check(pictures.NAME, name, cases[name](), RECORDED[name])


def test_every_form_is_recorded(cases):
    assert sorted(cases) == sorted(RECORDED)


def test_forms_made_in_different_ways_are_equal():
    assert RECORDED["processes"] == RECORDED["float32"] == RECORDED["levels"]
    assert RECORDED["views in processes"] == RECORDED["views"]
    assert RECORDED["rgb and flow in processes"] == RECORDED["rgb and flow"]
