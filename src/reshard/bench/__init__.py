"""Benchmarks: refits beside the usual way and bare copies, in one run on one machine, so that ratios can be read."""

SCENARIOS = ("tp4", "tp2dp2", "small-tensors")
TRANSPORTS = ("torch_p2p", "shm")

RATIOS = (
    ("gather_broadcast_shm", "reshard_shm"),  # the same transport: nothing is owed to gloo
    ("gather_broadcast", "reshard_gloo"),
    ("gather_broadcast", "reshard_shm"),
    ("gather_broadcast", "reshard_shm_private"),
    ("gather_broadcast", "point_to_point_gloo"),
    ("reshard_shm", "bare_pull"),
    ("reshard_shm_private", "bare_staged"),
    ("memcpy", "bare_pull"),
    ("reshard_shm_sum", "reshard_shm"),
    ("reshard_shm_fingerprint", "reshard_shm"),
)
"""(a, b): how many times as long as b takes a."""

REACH = {
    "gather_broadcast / reshard_gloo": {"at_least": 2.3},
    "gather_broadcast / reshard_shm": {"at_least": 9.0},
    "reshard_shm / bare_pull": {"at_most": 1.25},
    "reshard_shm_private / bare_staged": {"at_most": 1.25},
    "memcpy / bare_pull": {"at_least": 0.75},
}
"""What the ratios of tp4 are meant to be."""

SMALL_REACH = {"at_most": 1.3}
"""What each of ``cpu_seconds_ratio`` is meant to be at most."""
