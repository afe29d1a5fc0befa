"""What must never be wrong: the modules whose mutants are tested, and the tests that must notice them."""

from typing import Final

SUBJECTS: Final[dict[str, tuple[str, ...]]] = {
    "fastvid/format/packets.py": ("tests/format/test_packets.py",),
    "fastvid/format/presentation.py": ("tests/format/test_presentation.py",),
    "fastvid/load/order/draws.py": (
        "tests/load/order/test_random_draws.py",
        "tests/load/order/test_permutation.py",
        "tests/load/order/test_shares.py",
        "tests/videos/test_access.py::test_a_loader_takes_a_subset_in_its_order",
    ),
    "fastvid/load/order/epoch.py": (
        "tests/load/order/test_batches.py",
        "tests/load/order/test_shares.py",
        "tests/load/order/test_epoch.py",
        "tests/load/batch/test_signals.py",
        "-k",
        "not checkpoint and not quality",
    ),
    "fastvid/load/clips/views.py": ("tests/load/clips/test_views.py",),
    "fastvid/load/workers/clip_worker.py": ("tests/load/workers/test_fetch.py",),
    "fastvid/decode/clips.py": ("tests/decode/test_packet_reads.py", "tests/load/workers/test_fetch.py"),
    "fastvid/runtime/values.py": ("tests/runtime/test_values.py",),
    "fastvid/format/generations.py": ("tests/format/test_generations.py",),
    "fastvid/sharding/job/ledger.py": ("tests/sharding/job/test_ledger.py", "tests/sharding/change/test_takedown.py"),
    "fastvid/train/records/checkpoint.py": ("tests/train/records/test_checkpoint.py", "-k", "not kill and not store"),
    "fastvid/train/strategies/average.py": (
        "tests/train/strategies/shared/test_averager.py",
        "tests/train/strategies/adaptive_batch/test_batch_policy.py",
        "tests/train/strategies/kavg/test_kavg.py",
        "-k",
        "not doubles and not one_step",
    ),
}
"""Arguments of pytest for each module: its own tests, because a mistake should be noticed where it is made. Those that
kill processes, start servers or open many loaders are left out: they take longer than all others."""
