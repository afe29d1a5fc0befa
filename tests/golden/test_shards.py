"""Tars, sidecars and tables are as recorded: encoded ones with a known build of ffmpeg, others with every build."""

import pytest

from tests.golden import golden, shards

RECORDED, ENCODED, CORPUS = golden.read(shards.NAME), golden.read("encoded"), golden.read("corpus")


def recorded(builds, profile):
    """Return the digests of a profile for the installed build, or skip."""
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
def test_encoder_independent_datasets_are_as_recorded(cases, name):
    golden.check(shards.NAME, name, cases[name](), RECORDED[name])


def test_every_dataset_is_recorded(cases):
    assert sorted(cases) == sorted(RECORDED)


def test_recomputed_sidecars_equal_the_lost_ones():
    assert RECORDED["rebuilt"] | {"packed": "4 of 4"} == RECORDED["copy"]


@pytest.mark.parametrize("profile", shards.ENCODED)
def test_films_are_encoded_to_the_recorded_bytes(encoded, profile):
    golden.check("encoded", profile, encoded[profile](), recorded(ENCODED, profile))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", shards.ALL)
def test_real_videos_are_encoded_to_the_recorded_bytes(footage, tmp_path, profile):
    golden.check("corpus", profile, shards.corpus(footage, tmp_path)[profile](), recorded(CORPUS, profile))
