"""One rank of `bench.strategies.local_steps.Ranks`, started with torchrun's environment variables."""

from __future__ import annotations

import json
import sys

from bench.strategies.local_steps import TIMEOUT_S, RunSpec, run
from bench.strategies.relay_steps import travel
from bench.strategies.slow_network import SlowLink


def main() -> None:
    """Read run specifications from stdin, one JSON line each, and write one JSON result line for each."""
    import torch

    from fastvid.train.ranks.elastic import join

    torch.set_num_threads(1)
    with join(TIMEOUT_S) as member:
        for line in sys.stdin:
            values = json.loads(line)
            spec = RunSpec(**{**values, "link": SlowLink(**values["link"])})
            found = travel(spec, member) if spec.sync == "relay" else run(spec, member)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
