"""Effects of staleness with the real server: stability limit and histograms."""

import math
from collections import Counter, deque

import pytest
import torch
from torch import Tensor

from tests.train.strategies.asgd.kit import client_of, serving

pytestmark = pytest.mark.soak  # many processes and real waiting: a minute or two

RATE = 0.5


def descend(curvature: Tensor, delay: int, steps: int) -> tuple[Tensor, Counter[int]]:
    """Descent on ``curvature * w**2 / 2`` from 1, each gradient being pushed `delay` pushes after its weights were
    fetched. Returns the largest weights of the first and of the last quarter of the steps, and the staleness."""
    size = curvature.numel()
    with serving(size) as server:
        with client_of(server) as client:
            weights = torch.ones(size, dtype=torch.float64)
            client.join(weights)
            late: deque[tuple[Tensor, int]] = deque()
            path = []
            for _ in range(steps):
                late.append((curvature * weights, client.version))
                if len(late) > delay:
                    gradient, since = late.popleft()
                    client.push(gradient, RATE, since)
                client.fetch()
                path.append(weights.abs().clone())
        staleness = server.staleness
    quarter = steps // 4
    first, last = torch.stack(path[:quarter]).amax(0), torch.stack(path[-quarter:]).amax(0)
    return torch.stack([first, last]), staleness


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7, 15])
def test_delayed_descent_is_stable_exactly_below_the_limit(delay: int) -> None:
    limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1))) / RATE
    factors = torch.tensor([0.5, 0.95, 1.05, 1.5], dtype=torch.float64)
    (first, last), staleness = descend(factors * limit, delay, 60 + 25 * delay)
    assert ((last > first) == (factors > 1)).all()
    # The first gradients wait too, so each is pushed over just as many versions, except while the queue fills.
    steps = 60 + 25 * delay
    assert staleness[delay] >= steps - 2 * delay
    assert max(staleness) == delay
