"""TSM-ResNet-50, 16 frames, Kinetics-400: 72.6 % top-1 with one centre crop of one clip.

The number is from the TSM repository's model zoo (TSM-R50, 16 frames, uniform sampling, 1 crop; commit 0185b90), the
settings from its scripts/train_tsm_kinetics_rgb_16f.sh (commit 1846ca9), the same as for 8 frames.

    fastvid shard kinetics400/train kinetics400/val --out shards/kinetics400 \\
        --annotations kinetics:kinetics400/train.csv --annotations kinetics:kinetics400/validate.csv --profile compact

    torchrun --nproc-per-node 8 -m fastvid.train kinetics400_tsm_r50_16f model.weights=resnet50.pth
    torchrun --nproc-per-node 8 -m fastvid eval kinetics400_tsm_r50_16f
"""

from fastvid.train import (
    CenterCrop,
    Config,
    DataConfig,
    HorizontalFlip,
    ModelConfig,
    MultiScaleCrop,
    OptimConfig,
    RunConfig,
    Segments,
    ShardConfig,
)


def recipe() -> Config:
    """The uniform 16-frame recipe of the TSM repository, in bfloat16."""
    return Config(
        shard=ShardConfig(
            sources=("kinetics400/train", "kinetics400/val"),
            annotations=("kinetics:kinetics400/train.csv", "kinetics:kinetics400/validate.csv"),
            profile="compact",
        ),
        data=DataConfig(
            path="shards/kinetics400",
            split="train",
            eval_split="val",
            frames=Segments(16),
            eval_frames=Segments(16, jitter=False),
            spatial=(MultiScaleCrop(224), HorizontalFlip(0.5)),
            eval_spatial=(CenterCrop(224),),
            global_batch_size=128,
            eval_batch_size=256,
            # Old downloads have gaps; clips that do not decode are skipped and counted, never replaced.
            on_error="skip",
        ),
        model=ModelConfig(name="tsm-r50", options={"dropout": 0.5}),
        optim=OptimConfig(
            base_lr=0.02,
            base_batch_size=128,
            weight_decay=1e-4,
            groups="tsm",
            decay="step",
            milestones=(20.0, 40.0),
            clip_norm=20.0,
        ),
        run=RunConfig(out="runs/kinetics400_tsm_r50_16f", epochs=50, amp="bf16"),
    )
