"""Overlapping transfers with the real server; see test_asgd_run for one client that equals plain training."""

from __future__ import annotations

import torch

from tests.train.strategies.asgd.kit import client_of, serving, weights_of

SIZE, STEPS = 37, 30


def test_overlapping_transfers_neither_lose_nor_change_gradients() -> None:
    """The server's weights are the initial ones minus every gradient of the client, in order."""
    generator = torch.Generator().manual_seed(3)
    start, *given = torch.randn(STEPS + 1, SIZE, generator=generator, dtype=torch.float64)
    # 37 = 3 * 12 + 1: the last of three shards is longer.
    with serving(SIZE, shards=3) as server:
        with client_of(server, SIZE, overlap=True) as client:
            client.join(start.clone())
            reused = torch.empty(SIZE, dtype=torch.float64)
            for gradient in given:
                # The caller overwrites its buffer while the push of the previous contents is in flight.
                client.step(reused.copy_(gradient), 0.1)
            client.settle()
        final = weights_of(server)
    expected = start.clone()
    for gradient in given:
        expected.add_(gradient, alpha=-0.1)
    assert torch.equal(final, expected)
    # A gradient is computed while the previous push is in flight: one version stale, except the first.
    assert client.staleness == {0: 1, 1: STEPS - 1}
