"""What is on disk: constants, packet tables, bitstream facts, shards and datasets. No decoding happens here."""
