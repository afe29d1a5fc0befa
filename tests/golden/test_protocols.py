"""Evaluation protocols use the recorded clips and crops, in the trainer and in `fastvid.Views`."""

import pytest

from tests.golden import golden, protocols

RECORDED = golden.read(protocols.NAME)


@pytest.mark.parametrize("protocol", RECORDED)
def test_the_trainers_views_are_as_recorded(protocol):
    golden.check(protocols.NAME, protocol, protocols.by_trainer(protocol), RECORDED[protocol])


@pytest.mark.parametrize("protocol", [name for name in RECORDED if name not in protocols.OF_SEGMENTS])
def test_loader_views_equal_the_trainers_views(protocol):
    golden.check(protocols.NAME, protocol, protocols.by_loader(protocol), RECORDED[protocol])


def test_every_protocol_is_recorded():
    assert sorted(protocols.PROTOCOLS) == sorted(RECORDED)
