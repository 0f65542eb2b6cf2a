"""Checkpoints that exist only when they are proven. Importing this package imports no torch.

config     the recipe's part
store      `CheckpointStore`: save, wait, find, load
writing    one checkpoint on its way, and how long a failure is fought
find       looks for checkpoints without torch or a process group
manifest   what makes a folder a checkpoint; `verify` reads all of it
retention  which checkpoints stay
room       whether they will fit
places     where they lie: a folder or an object store
tensors    their tensors, in and out
staging    copies of the state, made while training goes on
state      model and optimizers as one flat set of named tensors; `partial` loads what fits
compare    what two checkpoints do not have in common
rng        random states as bytes
ranks      agreement between ranks
"""
