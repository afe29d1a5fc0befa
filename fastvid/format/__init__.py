"""The on-disk format: constants, packet tables, bitstream headers, shards and datasets; no decoding."""
