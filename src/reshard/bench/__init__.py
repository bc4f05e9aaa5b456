"""Benchmarks: refits beside the usual way and bare copies, in one run on one machine, so that ratios can be read."""

SCENARIOS = ("tp4", "tp2dp2", "small-tensors")
TRANSPORTS = ("torch_p2p", "shm")
