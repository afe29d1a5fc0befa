"""Real runs have the recorded losses: 50 steps in float64 on one rank and on two, and the evaluations afterwards."""

import pytest

from tests.golden import golden, runs

RECORDED = golden.read(runs.NAME)
NAMES = [name for name in RECORDED if name != "kernels"]
# With other kernels only twelve digits are compared, because torch's softmax differs in the last bit.
BITS = RECORDED["kernels"] == runs.kernels()


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return runs.cases(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("losses")])
def test_losses_are_as_recorded(cases, name):
    found = cases[name]()
    assert len(found.split()) == (runs.STEPS if "ddp" in name else len(RECORDED[name].split()))
    difference = runs.first_difference(found, RECORDED[name], bits=BITS)
    if difference:
        golden.check(runs.NAME, name, f"{difference}\n{found}", RECORDED[name])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("evaluation")])
def test_evaluations_are_as_recorded(cases, name):
    found = cases[name]()
    # Views may be summed in another order.
    if not runs.first_difference(found["loss"], RECORDED[name]["loss"], bits=False):
        found["loss"] = RECORDED[name]["loss"]
    golden.check(runs.NAME, name, found, RECORDED[name])


def test_every_run_is_recorded(cases):
    assert sorted(cases) == sorted(NAMES)


def test_a_difference_in_the_last_bit_is_detected_when_bits_are_compared():
    one, other = (1.0).hex(), (1.0 + 2**-52).hex()
    assert runs.first_difference(one, other, bits=True)
    assert not runs.first_difference(one, other, bits=False)
    assert runs.first_difference(one, (1.0 + 1e-11).hex(), bits=False)
    assert runs.first_difference(one, f"{one} {one}", bits=False)
