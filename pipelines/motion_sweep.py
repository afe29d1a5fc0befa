"""A sweep of three models that reads the motion dataset once: widths, rates, momentum and decay differ.

    fastvid shard runs/demo/videos --out runs/sweep/shards \\
        --annotations csv:runs/demo/videos/annotations.csv --profile compact --short-side 96 --samples-per-shard 128
    torchrun --nproc-per-node 2 -m fastvid.train motion_sweep

``fastvid demo`` makes the videos. There must be at least as many shards as stages.
"""

from dataclasses import replace

from fastvid.train import (
    CenterCrop,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RandomCrop,
    RunConfig,
    Segments,
    ShardConfig,
)


def recipe() -> Config:
    """The first model of the sweep; sync=ddp trains it alone."""
    return Config(
        shard=ShardConfig(
            sources=("runs/demo/videos",),
            annotations=("csv:runs/demo/videos/annotations.csv",),
            options={"short-side": "96", "samples-per-shard": "128"},
        ),
        data=DataConfig(
            path="runs/sweep/shards",
            split="train",
            eval_split="test",
            frames=Segments(8),
            eval_frames=Segments(8, jitter=False),
            spatial=(RandomCrop(64),),
            eval_spatial=(CenterCrop(64),),
            global_batch_size=16,
        ),
        model=ModelConfig(name="tsm-r18", options={"width": 16, "dropout": 0.0, "shift_div": 4}),
        optim=OptimConfig(
            base_lr=0.03,
            base_batch_size=16,
            nesterov=True,
            weight_decay=5e-4,
            warmup_epochs=3,
            decay="cosine",
            clip_norm=20.0,
        ),
        run=RunConfig(out="runs/sweep/out", epochs=20),
        sync="relay",
    )


def sweep() -> list[Config]:
    """Quarter width; a wider net with a lower rate; and one with dropout, less momentum and more weight decay."""
    first = recipe()
    return [
        first,
        replace(
            first,
            model=replace(first.model, options={"width": 20, "dropout": 0.0, "shift_div": 4}),
            optim=replace(first.optim, base_lr=0.02),
        ),
        replace(
            first,
            model=replace(first.model, options={"width": 18, "dropout": 0.1, "shift_div": 4}),
            optim=replace(first.optim, base_lr=0.025, momentum=0.85, weight_decay=1e-3),
        ),
    ]
