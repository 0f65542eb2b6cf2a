"""Whether converted weights compute what the published ones do: our modules against a reference.

reference  the families' formulas, from the papers, on tensors as they are published
raw        published tensors by their own names, quantised ones as numbers
lent       our modules with weights that are in memory only while they are used
compare    both on random inputs, part by part; what differs is named
"""

from armillary.checkpoint.hugging_face.check.compare import check_conversion

__all__ = ["check_conversion"]
