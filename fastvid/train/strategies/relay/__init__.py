"""Model hopping: a sweep over models and hyper-parameters whose models move between data partitions.

    sweep       the training of several models on the same dataset
    partition   some shards of the dataset
    stage       a process that keeps some partitions on local storage and trains the models that visit them
    visit       one model trained on one partition in one epoch; `Unit` says which
    token       the state of a model that moves to the next stage: weights, optimizer, schedule position, RNG, visits
    hub         stores the newest token of every model and schedules the visits

Each model is trained by plain sequential SGD over the partitions in the order of its visits; nothing is averaged or
synchronized. The strategy replaces the training loop by a sweep; the step, replica, schedule and evaluation are those
of the training loop.

Tokens pass through the hub, which costs twice the bytes of a direct transfer. In return, the newest token of every
model survives the death of a stage: only the visit in progress is repeated, from that token.
"""
