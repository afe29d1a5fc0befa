"""TSM-ResNet-50, 8 frames, Kinetics-400: 71.2 % top-1 with one centre crop of one clip.

The number is from the TSM repository's model zoo (TSM-R50, 8 frames, uniform sampling, 1 crop; commit 1f6a834), as are
the settings, from its scripts/train_tsm_kinetics_rgb_8f.sh and ops/models.py: ImageNet weights, 50 epochs, learning
rate 0.02 at 128 clips, divided by 10 at epochs 20 and 40, gradient clipping at 20, dropout 0.5. Larger batches scale
the rate; use warm-up with them.

    fastvid shard kinetics400/train kinetics400/val --out shards/kinetics400 \\
        --annotations kinetics:kinetics400/train.csv --annotations kinetics:kinetics400/validate.csv --profile compact

One node of 8 GPUs:

    torchrun --nproc-per-node 8 -m fastvid.train kinetics400_tsm_r50 model.weights=resnet50.pth

Elastic training on one to four nodes, on each of them:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m fastvid.train kinetics400_tsm_r50 model.weights=resnet50.pth run.micro_batch_size=16

12,288 clips per step, the batch size of Lin, Gan and Han 2019 ("Training Kinetics in 15 Minutes"), with warm-up and
zero-initialised gammas as in Goyal et al. 2017. Warm-up starts at the base rate, 0.02 of the 1.92 that the linear rule
gives:

    torchrun --nnodes 256 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m fastvid.train kinetics400_tsm_r50 data.global_batch_size=12288 optim.warmup_epochs=5 \\
        optim.warmup_start=0.0104 run.epochs=100 optim.milestones=40,80 \\
        model.options.zero_init_residual=true model.weights=resnet50.pth
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
    """The uniform 8-frame recipe of the TSM repository, in bfloat16."""
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
            frames=Segments(8),
            eval_frames=Segments(8, jitter=False),
            spatial=(MultiScaleCrop(224), HorizontalFlip(0.5)),
            eval_spatial=(CenterCrop(224),),
            global_batch_size=128,
            eval_batch_size=512,
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
        run=RunConfig(out="runs/kinetics400_tsm_r50", epochs=50, amp="bf16"),
    )
