"""Asynchronous SGD: a parameter server, and clients that push gradients and fetch weights.

    messages        message headers; each client has a separate link, so that its death does not affect the others
    weight_shard    a range of the weights with its optimizer: versions and consistent snapshots
    staleness       how staleness changes the rate of a push, and how far a client may run ahead
    lease           the samples that a client trains on; those of a dead client are reassigned
    server          serves one shard, with one thread per client
    client          a client of all shards of a server
    downpour        when the training loop pushes and fetches; double buffering

A vector fetched from several shards consists of one committed version of each; the versions of two shards may differ by
the pushes in flight.
"""
