"""Optimizers and learning-rate schedules. See docs/optim.md."""
