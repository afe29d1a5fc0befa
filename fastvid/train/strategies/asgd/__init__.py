"""A parameter server, and clients that never wait for each other: asynchronous SGD.

    messages        message headers; each client has a separate link, so that its death does not affect the others
    weight_shard    a range of the weights with its optimizer: versions and consistent snapshots
    staleness       how staleness changes the rate of a gradient, and how far a client may run ahead
    lease           the samples that a client trains on; those of a dead client are reassigned
    record          what a server knows about a client
    server          serves one shard, with one thread per client
    client          a client of all shards of a server
    vector          a model as one vector on the CPU
    gradients       pushes each gradient and fetches weights; double buffering
    options         checks options before data are read

A vector fetched from several shards consists of one committed version of each; the versions of two shards may differ by
the pushes in flight.
"""
