"""Optimizers, learning-rate schedules and gradient clipping. See docs/optim.md."""
