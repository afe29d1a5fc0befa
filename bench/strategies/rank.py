"""One rank of `bench.strategies.local_steps.Ranks`, started with torchrun's variables."""

from __future__ import annotations

import json
import sys

from bench.strategies.local_steps import TIMEOUT_S, Job, run
from bench.strategies.relay_steps import travel
from bench.strategies.slow_network import Link


def main() -> None:
    """One rank: reads jobs, one JSON line each, and answers with one each."""
    import torch

    from fastvid.train.ranks.elastic import join

    torch.set_num_threads(1)
    with join(TIMEOUT_S) as member:
        for line in sys.stdin:
            values = json.loads(line)
            job = Job(**{**values, "link": Link(**values["link"])})
            found = travel(job, member) if job.sync == "relay" else run(job, member)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
