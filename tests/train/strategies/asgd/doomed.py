"""A client in a separate process, which dies at the fault point named in the environment.

``python -m tests.train.strategies.asgd.doomed SIZE PORT``
"""

from __future__ import annotations

import sys

import torch

from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient
from fastvid.train.strategies.link import Address, shared_token


def main() -> None:
    torch.set_num_threads(1)
    size, head = int(sys.argv[1]), Address("127.0.0.1", int(sys.argv[2]), shared_token("the server"))
    ones = torch.ones(size, dtype=torch.float64)
    client = ParameterClient(head, size, timeout_s=30.0)
    client.join(torch.zeros(size, dtype=torch.float64))
    while (lease := client.lease()) is not None:
        for position in range(lease.start, lease.stop):
            client.push(ones, 1.0, progress=LeaseProgress(lease.number, position + 1))
    client.leave()


if __name__ == "__main__":
    main()
