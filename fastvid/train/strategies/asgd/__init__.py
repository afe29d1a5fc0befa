"""Asynchronous SGD: a parameter server and clients that push gradients and fetch weights, each at its own pace.

    messages        the words of a message; each client has a link of its own, so that its death ends no other
    weight_shard    a range of the weights with its optimiser: versions, and snapshots that are never torn
    staleness       what staleness does to a push, and how far a client may run ahead
    lease           which samples a client trains on; those of a dead client are given out again
    server          one shard's service, a thread a client
    client          the other end: all shards of a server
    downpour        a training loop's part: when to push and fetch, double buffers

A vector that was fetched from several shards is, range by range, a committed version of each; the versions of two
shards may differ by the pushes that are under way.
"""
