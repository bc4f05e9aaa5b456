"""Move the bytes that others chose; see `base` for the protocol.

The transports need torch, so nothing is imported here: use `reshard.transports.memory`, `.torch_p2p` or `.shm`.
"""
