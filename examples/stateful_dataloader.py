"""fastvid in torchdata's StatefulDataLoader, which saves the loader's state, for code that expects one.

python examples/stateful_dataloader.py shards/mine
"""

import sys

from torchdata.stateful_dataloader import StatefulDataLoader

import fastvid


def make(url, crop=112):
    clips = fastvid.ClipLoader(
        fastvid.open(url), frames=fastvid.Segments(8), spatial=fastvid.RandomResizedCrop(crop), global_batch_size=4
    )
    return StatefulDataLoader(clips, batch_size=None)


def main(url):
    loader = make(url)
    for number, batch in enumerate(loader):
        print(batch)
        if number == 2:
            break
    resumed = make(url)
    resumed.load_state_dict(loader.state_dict())
    print("resumed:", next(iter(resumed)))


if __name__ == "__main__":
    main(sys.argv[1])
