"""Models that travel between data partitions: a sweep over models and hyper-parameters that reads its data once.

    stage       a process that keeps one part of the shards and trains whichever model visits it
    unit        one visit: one model, one epoch, one partition
    token       what travels: weights, optimiser, position in the schedule, RNG, the visits made
    hub         keeps the newest token of every model and decides who goes where next

Each model sees plain sequential SGD over the partitions in the order of its visits; nothing is averaged. So this is not
a way in which replicas of one model agree: its strategy starts a sweep with its own hub and units in place of the
training loop, and shares the step, the replica, the schedule and the evaluation with it.

Tokens pass through the hub, which costs twice the bytes of a direct hand-over, and for that the newest token of every
model is safe when a stage dies: the unit under way is run again from it, and nothing else is lost.
"""
