"""TSM-ResNet-50 fine-tuned on HMDB51, split 1: 72.68 % top-1 with one centre crop of one clip of 8 frames.

Number and settings are from mmaction2's tsm_k400_pretrained_r50_1x1x8_25e_hmdb51_rgb.py (0.x zoo; config at commit
28ac80c): TSM weights from Kinetics-400, 25 epochs, learning rate 0.0015 at 96 clips, divided by 10 at epochs 10 and 20,
no flip.

    fastvid shard hmdb51 --out shards/hmdb51 --annotations hmdb51:testTrainMulti_7030_splits --profile compact
    torchrun --nproc-per-node 8 -m fastvid.train hmdb51_tsm_r50 \\
        model.weights=TSM_kinetics_RGB_resnet50_shift8_blockres_avg_segment8_e50.pth

Splits 2 and 3: data.split=split2:train data.eval_split=split2:test.
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
    """mmaction2's fine-tuning recipe, in bfloat16."""
    return Config(
        shard=ShardConfig(
            sources=("hmdb51",),
            annotations=("hmdb51:testTrainMulti_7030_splits",),
            profile="compact",
        ),
        data=DataConfig(
            path="shards/hmdb51",
            split="split1:train",
            eval_split="split1:test",
            frames=Segments(8),
            eval_frames=Segments(8, jitter=False),
            spatial=(MultiScaleCrop(224),),
            eval_spatial=(CenterCrop(224),),
            global_batch_size=96,
            eval_batch_size=512,
            on_error="raise",
        ),
        model=ModelConfig(name="tsm-r50", options={"dropout": 0.5}),
        optim=OptimConfig(
            base_lr=0.0015,
            base_batch_size=96,
            weight_decay=1e-4,
            groups="tsm",
            decay="step",
            milestones=(10.0, 20.0),
            clip_norm=20.0,
        ),
        run=RunConfig(out="runs/hmdb51_tsm_r50", epochs=25, amp="bf16"),
    )
