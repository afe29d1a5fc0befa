"""A parameter server, and clients that never wait for each other: asynchronous SGD.

    weights         a model as one vector, and ranges of it with their optimizers: versions and consistent snapshots
    lease           the samples that a client trains on; those of a dead client are reassigned
    server          serves one shard, with one thread per client
    client          a client of all shards of a server: messages, pushes and fetches, double buffering
    strategy        the strategy itself, and the checks of its options

A vector fetched from several shards consists of one committed version of each; the versions of two shards may differ by
the pushes in flight.
"""
