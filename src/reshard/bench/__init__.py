"""Benchmarks: refits beside the usual way and beside bare copies, in one run on one machine, so that ratios can be read."""
