"""A client in a process of its own, which dies where the environment says."""

from __future__ import annotations

import sys

import torch

from fastvid.train.strategies.asgd.client import Client, Progress


def main() -> None:
    torch.set_num_threads(1)
    size, addresses = int(sys.argv[1]), [("127.0.0.1", int(port)) for port in sys.argv[2:]]
    client = Client(addresses, size, timeout_s=30.0)
    client.join(torch.zeros(size, dtype=torch.float64))
    while (lease := client.lease()) is not None:
        for position in range(lease.start, lease.stop):
            client.push(torch.ones(size, dtype=torch.float64), 1.0, progress=Progress(lease.number, position + 1))
    client.leave()


if __name__ == "__main__":
    main()
