"""Tensors to and from a place, in our own format: safetensors files and an index in plain JSON.

pieces  what this rank holds of each whole tensor
plan    which rank writes which piece, and where in which file it comes to lie
index   `tensors.json`: every piece of every tensor, by name
write   pieces to files
read    from the files, what this rank's own pieces need
match   whether a checkpoint and a model have the same tensors
"""

from armillary.checkpoint.tensors.index import INDEX_NAME, Stored, logical_bytes, stored_tensors
from armillary.checkpoint.tensors.match import Differences, compare, held_by_all, require_match
from armillary.checkpoint.tensors.pieces import Piece, digest, flatten, pieces_in, pieces_of
from armillary.checkpoint.tensors.plan import Planner
from armillary.checkpoint.tensors.read import read_box, read_tensor, read_tensors
from armillary.checkpoint.tensors.write import write_tensors

__all__ = [
    "INDEX_NAME",
    "Differences",
    "Piece",
    "Planner",
    "Stored",
    "compare",
    "digest",
    "flatten",
    "held_by_all",
    "logical_bytes",
    "pieces_in",
    "pieces_of",
    "read_box",
    "read_tensor",
    "read_tensors",
    "require_match",
    "stored_tensors",
    "write_tensors",
]
