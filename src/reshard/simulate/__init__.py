"""What a refit would cost: a clock of its own, and no clock, sleep or tensor. Pure."""
