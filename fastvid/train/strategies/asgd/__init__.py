"""Asynchronous SGD: a parameter server and clients that push gradients and fetch weights, each at its own pace.

    messages        a header of integers, a payload of numbers, checksums
    connect         one process group of two for each client, so that a client's death frees only its own
    weight_shard    a range of the weights with its optimiser: versions, and snapshots that are never torn
    staleness       what staleness does to a push, and how far a client may run ahead
    lease           which samples a client trains on; those of a dead client are given out again
    server          one shard's service, a thread a client
    client          the other end: all shards of a server
    downpour        a training loop's part: when to push and fetch, double buffers

A vector that was fetched from several shards is, range by range, a committed version of each; the versions of two
shards may differ by the pushes that are under way.
"""
