"""What fastvid makes is as recorded: orders, crops and pictures, states, losses and evaluations, tars and tables.

Encoded tars are compared with those of a known build of ffmpeg, all others with every build. A difference that is meant
is recorded with `python -m tests.golden`, and mentioned in the changelog.
"""

import functools

import pytest

from tests.golden import golden, orders, pictures, runs, seams, shards, states

AREAS = {area.NAME: area for area in (orders, pictures, states, shards, runs)}
RECORDED = {name: golden.read(name) for name in AREAS}
RUNS = [name for name in RECORDED[runs.NAME] if name != "kernels"]
# With other kernels only twelve digits are compared, because torch's softmax differs in the last bit.
BITS = RECORDED[runs.NAME]["kernels"] == runs.kernels()


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return functools.cache(lambda area: AREAS[area].cases(tmp_path_factory.mktemp(area)))


@pytest.mark.parametrize(
    ("area", "name"), [(area, name) for area in AREAS if area != runs.NAME for name in RECORDED[area]]
)
def test_what_is_made_is_as_recorded(cases, area, name):
    assert cases(area)[name]() == RECORDED[area][name]


@pytest.mark.parametrize("area", AREAS)
def test_every_case_is_recorded(cases, area):
    assert sorted(cases(area)) == sorted(RUNS if area == runs.NAME else RECORDED[area])


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("losses")])
def test_losses_are_as_recorded(cases, name):
    found, recorded = cases(runs.NAME)[name](), RECORDED[runs.NAME][name]
    assert len(found.split()) == (runs.STEPS if "ddp" in name else len(recorded.split()))
    assert not runs.first_difference(found, recorded, bits=BITS)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("evaluation")])
def test_evaluations_are_as_recorded(cases, name):
    found, recorded = cases(runs.NAME)[name](), RECORDED[runs.NAME][name]
    # Views may be summed in another order.
    if not runs.first_difference(found["loss"], recorded["loss"], bits=False):
        found["loss"] = recorded["loss"]
    assert found == recorded


def test_forms_made_in_different_ways_are_equal():
    recorded = RECORDED[pictures.NAME]
    assert recorded["processes"] == recorded["float32"] == recorded["levels"]
    assert recorded["views in processes"] == recorded["views"]
    assert recorded["rgb and flow in processes"] == recorded["rgb and flow"]


def test_recomputed_sidecars_equal_the_lost_ones():
    recorded = RECORDED[shards.NAME]
    assert recorded["rebuilt"] | {"packed": "4 of 4"} == recorded["copy"]


@pytest.mark.parametrize("profile", shards.ENCODED)
def test_films_are_encoded_to_the_recorded_bytes(tmp_path, profile):
    builds, (build, name) = golden.read("encoded"), seams.encoder(profile)
    if profile not in builds.get(build, {}):
        pytest.skip(f"no golden digests of this build: {name}")
    assert shards.encoded(tmp_path)[profile]() == builds[build][profile]
