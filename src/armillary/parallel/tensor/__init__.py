"""Tensor and sequence parallelism: matrices cut over ranks, tokens cut between them."""
