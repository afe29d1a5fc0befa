"""Tars, sidecars and tables are those that were recorded: by the byte where a build of ffmpeg is known, and everywhere
for what no encoder touches."""

from __future__ import annotations

import pytest

from tests.golden import golden, shards

RECORDED, ENCODED, CORPUS = golden.read(shards.NAME), golden.read("encoded"), golden.read("corpus")


def recorded(builds, profile):
    """The digests of a profile by the build that is here."""
    build, name = shards.made_by(profile)
    if profile not in builds.get(build, {}):
        pytest.skip(f"no golden digests of this build: {name}")
    return builds[build][profile]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return shards.cases(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    return shards.encoded(tmp_path_factory.mktemp("encoded"))


@pytest.mark.parametrize("name", RECORDED)
def test_what_no_encoder_touches_is_what_was_recorded(cases, name):
    golden.check(shards.NAME, name, cases[name](), RECORDED[name])


def test_every_dataset_is_recorded(cases):
    assert sorted(cases) == sorted(RECORDED)


def test_sidecars_that_were_lost_come_again_as_they_were():
    assert RECORDED["rebuilt"] | {"packed": "4 of 4"} == RECORDED["copy"]


@pytest.mark.parametrize("profile", shards.ENCODED)
def test_films_become_the_bytes_that_were_recorded(encoded, profile):
    golden.check("encoded", profile, encoded[profile](), recorded(ENCODED, profile))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", shards.ALL)
def test_real_videos_become_the_bytes_that_were_recorded(footage, tmp_path, profile):
    golden.check("corpus", profile, shards.corpus(footage, tmp_path)[profile](), recorded(CORPUS, profile))
