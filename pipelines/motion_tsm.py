"""The demo: a small TSM learns eight directions of motion on a CPU; no single frame reveals the direction.

    fastvid demo

makes the videos and runs all commands below. Manually:

    fastvid shard runs/demo/videos --out runs/demo/shards \\
        --annotations csv:runs/demo/videos/annotations.csv --profile compact --short-side 96
    torchrun --nproc-per-node 2 -m fastvid.train motion_tsm

The same net without temporal shift stays at chance (12.5 %): model.name=tsn-r18 model.options.shift_div=none. It does
learn what a single frame shows: data.label=texture.
"""

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
    """TSM on a quarter-width ResNet-18, 8 frames of 64 pixels, from scratch."""
    return Config(
        shard=ShardConfig(
            sources=("runs/demo/videos",),
            annotations=("csv:runs/demo/videos/annotations.csv",),
            profile="compact",
            options={"short-side": "96"},
        ),
        data=DataConfig(
            path="runs/demo/shards",
            split="train",
            eval_split="test",
            frames=Segments(8),
            eval_frames=Segments(8, jitter=False),
            # No flip: it would swap left and right.
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
        run=RunConfig(out="runs/demo/tsm", epochs=20, log_every_steps=12, eval_every_epochs=2),
    )
