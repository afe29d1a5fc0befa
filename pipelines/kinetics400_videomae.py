"""VideoMAE ViT-B fine-tuned on Kinetics-400: the settings of the VideoMAE repository, on weights of pre-training.

Settings are those of MCG-NJU/VideoMAE, FINETUNE.md and scripts/kinetics/videomae_vit_base_patch16_224_...: AdamW with
betas 0.9 and 0.999, rate 1e-3 at 256 clips, weight decay 0.05, layer decay 0.75, drop path 0.1, label smoothing 0.1,
mixup 0.8, CutMix 1.0, 5 epochs of warm-up, 75 epochs, 16 frames of stride 4. Not from there: the average of the
weights, and no RandAugment and repeated augmentation, which are ``data.after`` and ``data.clips_per_video``.

    fastvid shard kinetics400 --out shards/kinetics400 --annotations kinetics:annotations --profile compact
    torchrun --nproc-per-node 8 -m fastvid.train kinetics400_videomae
    fastvid eval kinetics400_videomae --protocol 5x3

It needs transformers. Weights are read once by each process; `model.options.pretrained=none` starts at random, and
`model.options.hidden_size=...` and others change the transformer.
"""

from fastvid.train import (
    CenterCrop,
    Classification,
    Config,
    DataConfig,
    Dense,
    HorizontalFlip,
    ModelConfig,
    OptimConfig,
    RandomResizedCrop,
    RunConfig,
    ShardConfig,
)


def recipe() -> Config:
    """ViT-B/16, 16 frames of 224 pixels, in bfloat16."""
    return Config(
        shard=ShardConfig(
            sources=("kinetics400",),
            annotations=("kinetics:annotations",),
            profile="compact",
        ),
        data=DataConfig(
            path="shards/kinetics400",
            frames=Dense(16, stride=4),
            eval_frames=Dense(16, stride=4, jitter=False),
            spatial=(RandomResizedCrop(224), HorizontalFlip(0.5)),
            eval_spatial=(CenterCrop(224),),
            global_batch_size=256,
            eval_batch_size=256,
            group_size=2,
        ),
        model=ModelConfig(
            name="fastvid.models.hugging_face:videomae",
            options={"pretrained": "MCG-NJU/videomae-base", "drop_path": 0.1},
        ),
        optim=OptimConfig(
            name="adamw",
            base_lr=1e-3,
            base_batch_size=256,
            weight_decay=0.05,
            layer_decay=0.75,
            warmup_epochs=5,
            warmup_start=0.001,
            decay="cosine",
            final=0.001,
            ema_decay=0.9999,
        ),
        task=Classification(label_smoothing=0.1, mixup=0.8, cutmix=1.0),
        run=RunConfig(out="runs/kinetics400_videomae", epochs=75, amp="bf16", micro_batch_size=8),
    )
