"""One rank of `bench.strategies.ranks.Ranks`, started with torchrun's environment variables."""

from __future__ import annotations

import json
import sys

from bench.strategies import rank_run, sweep_run
from bench.strategies.ranks import TIMEOUT_S, RunSpec
from bench.strategies.slow_network import SlowLink

_SWEEPS = {"relay": sweep_run.travel, "migrate": sweep_run.migrate}


def main() -> None:
    """Read run specifications from stdin, one JSON line each, and write one JSON result line for each."""
    import torch

    from fastvid.train.ranks import join

    torch.set_num_threads(1)
    with join(TIMEOUT_S) as member:
        for line in sys.stdin:
            values = json.loads(line)
            spec = RunSpec(**{**values, "links": [SlowLink(**link) for link in values["links"]]})
            print(json.dumps(_SWEEPS.get(spec.sync, rank_run.run)(spec, member)), flush=True)


if __name__ == "__main__":
    main()
