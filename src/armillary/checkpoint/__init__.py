"""Checkpoints that exist only when they are proven. Importing this package imports no torch.

config    the recipe's part
store     `CheckpointStore`: save, wait, find, load
find      looks for checkpoints without torch or a process group
manifest  what makes a folder a checkpoint
state     model and optimizers as one flat set of named tensors
rng       random states as bytes
"""
