"""A parameter server, and clients that never wait for each other: asynchronous SGD.

weights         a model as one vector, and the server's copy with its optimizer: versions and consistent snapshots
lease           which client trains on which samples; the samples of a dead client are reassigned
client          a client of a server: messages, pushes and fetches
server          the server, with one thread per client
strategy        the strategy itself, and the checks of its options
"""
