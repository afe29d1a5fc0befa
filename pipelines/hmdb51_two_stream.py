"""Two streams on HMDB51, ResNet-50 each: the paper reports 67.9 % top-1.

The number is from Cong, Domeniconi, Shapiro, Zhou and Chen, SBAC-PAD 2018 (doi 10.1109/CAHPC.2018.8645861, abstract):
two streams, K-step averaging, an adaptive batch size, an Adam variant for it, and transfer learning, on 16 GPUs. The
abstract has no settings. Those here are common in public two-stream code (stacks of 10 flows, cross-modality
initialisation from ImageNet, dropout 0.8, crops of 1, 0.875 and 0.75 of the short side, flow at 1.5 times the weight of
RGB); the schedules of batch size and Adam are fastvid's own. The number is a target, not a measurement of this recipe.

    fastvid shard hmdb51 --out shards/hmdb51 --annotations hmdb51:testTrainMulti_7030_splits --profile compact \\
        --streams rgb,flow

Each net separately, from ImageNet weights, on 16 GPUs that average every 8 steps:

    torchrun --nnodes 2 --nproc-per-node 8 -m fastvid.train hmdb51_two_stream model.name=tsn-r50 \\
        data.streams=rgb model.weights=resnet50.pth run.out=runs/hmdb51_spatial
    torchrun --nnodes 2 --nproc-per-node 8 -m fastvid.train hmdb51_two_stream model.name=temporal-r50 \\
        data.streams=flow model.weights=resnet50.pth run.out=runs/hmdb51_temporal

Their averaged scores, without further training; then, optionally, joint training of both nets:

    fastvid eval hmdb51_two_stream model.weights=SPATIAL.pt,TEMPORAL.pt
    torchrun --nnodes 2 --nproc-per-node 8 -m fastvid.train hmdb51_two_stream model.weights=SPATIAL.pt,TEMPORAL.pt

SPATIAL.pt and TEMPORAL.pt are files of runs/hmdb51_*/checkpoints, or weights trained on Kinetics. A joint head instead
of averaged scores: model.options.fusion=joint. TV-L1 flow, as in the published numbers, at a hundred times the cost:
--flow tvl1. Splits 2 and 3: data.split=split2:train data.eval_split=split2:test.
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
    """Three snippets per video, each a frame and the ten flows around it; K-step averaging of Adam."""
    return Config(
        shard=ShardConfig(
            sources=("hmdb51",),
            annotations=("hmdb51:testTrainMulti_7030_splits",),
            profile="compact",
            options={"streams": "rgb,flow"},
        ),
        data=DataConfig(
            path="shards/hmdb51",
            split="split1:train",
            eval_split="split1:test",
            frames=Segments(3),
            eval_frames=Segments(3, jitter=False),
            spatial=(MultiScaleCrop(224, scales=(1.0, 0.875, 0.75)), HorizontalFlip(0.5)),
            eval_spatial=(CenterCrop(224),),
            streams=("rgb", "flow"),
            flow_stack=10,
            global_batch_size=256,
            eval_batch_size=256,
        ),
        model=ModelConfig(name="two-stream-r50", options={"dropout": 0.8}),
        optim=OptimConfig(
            name="adam",
            base_lr=1e-4,
            base_batch_size=256,
            weight_decay=5e-4,
            decay="step",
            milestones=(40.0, 60.0),
            warmup_epochs=1,
            clip_norm=20.0,
        ),
        run=RunConfig(out="runs/hmdb51_two_stream", epochs=80, amp="bf16"),
        # The batch size doubles where the learning rate would decay, up to 1024.
        sync="kavg",
        sync_options={"period": 8, "batch": "schedule", "batch_max": 1024},
    )
