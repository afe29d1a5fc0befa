"""TSM-ResNet-50, 8 frames, Something-Something v2: 61.2 % top-1 with 2 clips of 3 crops at full resolution.

The number is from the TSM repository's model zoo (commit 0185b90), and so are the settings, from its README: ImageNet
weights, 50 epochs, learning rate 0.01 at 64 clips, divided by 10 at epochs 20 and 40, gradient clipping at 20, dropout
0.5. No flip: left and right are part of the labels.

    fastvid shard 20bn-something-something-v2 --out shards/ssv2 --annotations sthv2:labels --profile compact
    torchrun --nproc-per-node 8 -m fastvid.train ssv2_tsm_r50 model.weights=resnet50.pth
    torchrun --nproc-per-node 8 -m fastvid eval ssv2_tsm_r50 --protocol twicex3 --size 256
"""

from fastvid.train import (
    CenterCrop,
    Config,
    DataConfig,
    ModelConfig,
    MultiScaleCrop,
    OptimConfig,
    RunConfig,
    Segments,
    ShardConfig,
)


def recipe() -> Config:
    """The 8-frame recipe of the TSM repository for Something-Something, in bfloat16."""
    return Config(
        shard=ShardConfig(
            sources=("20bn-something-something-v2",),
            annotations=("sthv2:labels",),
            profile="compact",
        ),
        data=DataConfig(
            path="shards/ssv2",
            split="train",
            eval_split="val",
            frames=Segments(8),
            eval_frames=Segments(8, jitter=False),
            spatial=(MultiScaleCrop(224),),
            eval_spatial=(CenterCrop(224),),
            global_batch_size=64,
            eval_batch_size=512,
            on_error="raise",
        ),
        model=ModelConfig(name="tsm-r50", options={"dropout": 0.5}),
        optim=OptimConfig(
            base_lr=0.01,
            base_batch_size=64,
            weight_decay=1e-4,
            groups="tsm",
            decay="step",
            milestones=(20.0, 40.0),
            clip_norm=20.0,
        ),
        run=RunConfig(out="runs/ssv2_tsm_r50", epochs=50, amp="bf16"),
    )
