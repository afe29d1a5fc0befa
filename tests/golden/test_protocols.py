"""Evaluation protocols show the clips and crops that were recorded, by the trainer and by `fastvid.Views`."""

from __future__ import annotations

import pytest

from tests.golden import golden, protocols

RECORDED = golden.read(protocols.NAME)


@pytest.mark.parametrize("protocol", RECORDED)
def test_the_trainer_shows_what_was_recorded(protocol):
    golden.check(protocols.NAME, protocol, protocols.by_trainer(protocol), RECORDED[protocol])


@pytest.mark.parametrize("protocol", [name for name in RECORDED if name not in protocols.OF_SEGMENTS])
def test_views_of_a_loader_show_what_the_trainer_shows(protocol):
    golden.check(protocols.NAME, protocol, protocols.by_loader(protocol), RECORDED[protocol])


def test_every_protocol_is_recorded():
    assert sorted(protocols.PROTOCOLS) == sorted(RECORDED)
