"""One rank of a job that reads from a store: python -m tests.load.stores.store_ranks URL RANK WORLD EPOCHS OUT.

Writes to OUT.json what each step delivered, as [epoch, position, key, first frame's sum], and the traffic.
"""

import json
import sys

import torch

import fastvid


def main(url: str, rank: int, world: int, epochs: int, out: str) -> None:
    torch.set_num_threads(1)
    loader = fastvid.ClipLoader(
        fastvid.open(url),
        frames=fastvid.Segments(4),
        spatial=fastvid.CenterCrop(64),
        global_batch_size=2 * world,
        last="keep",
        rank=rank,
        world_size=world,
        output=fastvid.Output(dtype=torch.uint8),
        workers=fastvid.Workers(num_threads=1),
    )
    steps = []
    for _ in range(epochs):
        for batch in loader:
            sums = batch.video.flatten(1).long().sum(1).tolist()
            steps.append([list(row) for row in zip(batch.position.tolist(), batch.key, sums, strict=True)])
    total = loader.stats.total
    record = {"steps": steps, "requests": total.store_requests, "bytes": total.store_bytes}
    with open(f"{out}.json", "w") as file:
        json.dump(record | {"dollars": loader.stats.dollars, "skips": dict(total.skips)}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
