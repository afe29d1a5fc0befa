"""Model hopping: a sweep over models and hyper-parameters whose models move between data partitions.

    stage       a process that keeps some data partitions in memory and trains the models that visit it
    unit        one visit: one model, one epoch, one partition
    token       the state that moves: weights, optimizer, schedule position, RNG, visits so far
    hub         stores the newest token of every model and schedules the visits

Each model is trained by plain sequential SGD over the partitions in the order of its visits; nothing is averaged.
Replicas are therefore not synchronized: instead of the training loop, the strategy runs a sweep with a hub and units,
which shares the step, the replica, the schedule and the evaluation with the training loop.

Tokens pass through the hub, which costs twice the bytes of a direct transfer. In return, the newest token of every
model survives the death of a stage: only the unit in progress is repeated from it.
"""
