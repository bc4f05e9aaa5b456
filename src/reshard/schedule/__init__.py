"""In what order and in how much memory: streams, buckets, rounds. Pure."""
