"""Shipped for us and for users who write a transport: a conformance suite and real processes to run it in."""
