"""What a recipe says about number formats. Importing this module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from armillary.foundation.errors import Problem, nearest
from armillary.precision.low_precision_config import (
    Float8Rowwise,
    Float8RowwiseExactWeightGradient,
    Float8Tensorwise,
    LowPrecision,
    LowPrecisionConfig,
    Mxfp8,
    NoLowPrecision,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMPUTE_DTYPES",
    "Float8Rowwise",
    "Float8RowwiseExactWeightGradient",
    "Float8Tensorwise",
    "LowPrecision",
    "LowPrecisionConfig",
    "Mxfp8",
    "NoLowPrecision",
    "Precision",
]

COMPUTE_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number formats. Master weights, optimizer moments and reductions are float32 always.

    Weights kept in bfloat16 lose updates smaller than 1/256 of the weight, so there is no such
    choice. (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1)
    """

    compute: str = "bfloat16"
    """Format of activations and matrix products: bfloat16 or float32."""
    linears: LowPrecisionConfig = field(default_factory=NoLowPrecision)
    """Format of the matrix products inside blocks, if it is a lower one."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype that `compute` names."""
        import torch

        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.compute]

    def problems(self) -> list[Problem]:
        """Formats that do not exist here."""
        if self.compute in COMPUTE_DTYPES:
            return self.linears.problems()
        close = nearest(self.compute, COMPUTE_DTYPES) or COMPUTE_DTYPES[0]
        return [
            Problem(
                f"precision.compute = {self.compute} is not a format for computation",
                allowed=", ".join(COMPUTE_DTYPES),
                fix=f"--precision.compute {close}",
            ),
            *self.linears.problems(),
        ]
