"""One of two processes that use a ClipLoader and a ClipDataset inside Accelerate, the Trainer and Lightning.

Run by torchrun; writes to OUT/RANK.json what each scenario delivered: [epoch, position] of each clip, or its error.
"""

import faulthandler
import gc
import json
import os
import sys
import warnings
from operator import itemgetter
from pathlib import Path

import lightning
import torch
import torch.distributed as dist

# Imported while the process group runs, it would keep the group's threads until the exit, and they can abort it.
import torch.distributed.nn
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import fastvid
from fastvid.errors import UsageError
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import SPATIAL

SAMPLES, BATCH, EPOCHS = 33, 8, 2
PARTS = {"frames": fastvid.Segments(2), "spatial": SPATIAL, "decoder": fake(), "seed": 5}


def loader(**options):
    return fastvid.ClipLoader(FakeDataset(SAMPLES), global_batch_size=BATCH, **PARTS | options)


def sampled(batch_size=BATCH // 2, **options):
    clips = fastvid.ClipDataset(FakeDataset(SAMPLES), **PARTS)
    sampler = fastvid.ExactSampler(clips, global_batch_size=BATCH, **options)
    return DataLoader(clips, batch_size=batch_size, sampler=sampler, drop_last=True)


def places(batches):
    return [[int(batch.epoch), int(position)] for batch in batches for position in batch.position]


def epochs(batches):
    return [place for _ in range(EPOCHS) for place in places(batches)]


def refused(run):
    try:
        return f"delivered {run()}"
    except UsageError as error:
        return str(error)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, video, weight, epoch, position, **_):
        self.seen += [[int(epoch), int(one)] for one in position]
        return {"loss": (video.mean((1, 2, 3, 4)) * self.scale * weight).sum()}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        assert isinstance(batch, fastvid.Batch)
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(returns_loader, out):
    class ClipTrainer(Trainer):
        def get_train_dataloader(self):
            return self.train_dataset if returns_loader else super().get_train_dataloader()

    options = {"per_device_train_batch_size": 1, "remove_unused_columns": False, "num_train_epochs": EPOCHS}
    if not returns_loader:
        options["accelerator_config"] = {"dispatch_batches": False}
    options |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    args = TrainingArguments(str(out), use_cpu=True, **options)
    net = Net()
    ClipTrainer(net, args=args, train_dataset=loader(), data_collator=itemgetter(0)).train()
    return net.seen


def lit(batches, out):
    module = Module()
    silent = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": EPOCHS, "logger": False}
    trainer = lightning.Trainer(default_root_dir=out, **options, **silent)
    trainer.fit(module, batches)
    return module.net.seen


def ddp(batches):
    net = Net()
    model = DistributedDataParallel(net)
    for _ in range(EPOCHS):
        for batch in batches:
            model(**batch)["loss"].backward()
    return net.seen


def main(out):
    found = {}
    faulthandler.dump_traceback_later(60, repeat=True)
    early = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    before = loader()
    os.environ.update(early)
    accelerator = Accelerator(cpu=True)
    rank = dist.get_rank()
    found["made before"] = refused(lambda: places(before))
    found["Accelerate with the loader"] = epochs(accelerator.prepare(loader()))
    one = sampled(rank=0, world_size=1)
    found["Accelerate with an ExactSampler of one rank"] = epochs(accelerator.prepare(one))
    found["Accelerate with a DataLoader"] = refused(
        lambda: places(accelerator.prepare(DataLoader(loader(), batch_size=None)))
    )
    found["Accelerate with an ExactSampler of each rank"] = refused(lambda: places(accelerator.prepare(sampled())))
    plain = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    found["Accelerate with a DataLoader that is not dispatched"] = refused(
        lambda: places(plain.prepare(DataLoader(loader())))
    )
    found["DistributedDataParallel with an ExactSampler"] = ddp(sampled())
    found["Trainer that returns the loader"] = trained(True, out)
    found["Trainer with the loader as dataset"] = refused(lambda: trained(False, out))
    found["Lightning with the loader"] = lit(loader(), out)
    found["Lightning with an ExactSampler"] = lit(sampled(), out)
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
    # A gloo thread that releases a tensor at interpreter exit aborts the process, see `fastvid.train.ranks`.
    gc.collect()
    dist.destroy_process_group()
