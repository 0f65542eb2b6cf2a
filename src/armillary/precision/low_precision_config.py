"""Which matrix products run in 8 bits, and how. Importing this module loads no torch.

The slot is `precision.linears`. Weights, residual stream, norms, attention, router, embedding and
head keep their formats: only the operands of the products inside blocks are rounded, each just
before it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem

Emulate = Literal["auto", "always", "never"]


class LowPrecisionConfig(Component):
    """Slot `precision.linears`: the format of matrix products inside blocks."""

    __slots__ = ()

    recipe: ClassVar[str] = ""
    """Which products convert Linears and experts; empty: none do."""

    def problems(self) -> list[Problem]:
        """Values that make no sense."""
        return []


@component("none")
@dataclass(frozen=True, kw_only=True, slots=True)
class NoLowPrecision(LowPrecisionConfig):
    """All products run in `precision.compute`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecision(LowPrecisionConfig):
    """What every 8-bit recipe can be told.

    A pattern matches a name if it fits one or more whole words of it, between dots, with * for
    anything: `attention`, `layers.0` and `*.down` do.
    """

    multiple: ClassVar[int] = 16
    """What both dims of a weight are divided by: the float8 matrix units read 16 bytes at once."""

    only: tuple[str, ...] = ("layers.*",)
    """Patterns of names; what none of them matches is left in `precision.compute`."""
    skip: tuple[str, ...] = ()
    """Patterns of names that are left in `precision.compute` all the same."""
    experts: bool = True
    """Whether the grouped products of experts are converted too."""
    small: bool = True
    """Whether matrices are converted that are too small to gain speed from it; see `is_small`."""
    emulate: Emulate = "auto"
    """Multiply rounded operands in float32: always, never, or (auto) where the device has no units
    for the format. The same numbers, not the speed."""
    float8_all_gather: bool = False
    """Whether data sharding gathers the weights of Linears in 8 bits: half the traffic of bfloat16,
    the same numbers. For float8-tensorwise only."""

    def is_small(self, outputs: int, inputs: int) -> bool:
        """Whether rounding costs about what the faster product saves, on an H100.

        The thresholds are those of torchao's automatic filter for rowwise scales (pytorch/ao at
        36027d82, torchao/float8), which come from measurements on that device.
        """
        return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)

    def problems(self) -> list[Problem]:
        """See `LowPrecisionConfig.problems`."""
        found = []
        if not self.only or not all((*self.only, *self.skip)):
            found.append(
                Problem(
                    f"precision.linears.only = {list(self.only)}, skip = {list(self.skip)}",
                    allowed="patterns of one character or more; at least one in `only`",
                    fix="--precision.linears none",
                )
            )
        if self.float8_all_gather and self.recipe != Float8Tensorwise.recipe:
            found.append(
                Problem(
                    "precision.linears.float8_all_gather = true, and the products of "
                    f"{self.recipe} round a weight in more than one way",
                    allowed=f"false; true with {Float8Tensorwise.recipe}",
                    fix="--precision.linears.float8-all-gather false",
                )
            )
        return found


@component("float8-tensorwise")
@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Tensorwise(LowPrecision):
    """One scale for a whole tensor: the fastest recipe, and the coarsest.

    Inputs and weights are e4m3, gradients e5m2, which has more range and fewer digits.
    (Micikevicius et al. 2022, arXiv 2209.05433) Experts are rounded as in float8-rowwise: one scale
    for the rows of all of them would let one expert's outlier blunt the others.
    """

    recipe: ClassVar[str] = "float8-tensorwise"

    def is_small(self, outputs: int, inputs: int) -> bool:
        """See `LowPrecision.is_small`; torchao's thresholds for tensorwise."""
        return inputs <= 4096 and outputs <= 1024


@component("float8-rowwise")
@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Rowwise(LowPrecision):
    """One scale for each row that is reduced, a power of two; all operands are e4m3.

    An outlier blunts its own row only.
    """

    recipe: ClassVar[str] = "float8-rowwise"


@component("float8-rowwise-exact-weight-gradient")
@dataclass(frozen=True, kw_only=True, slots=True)
class Float8RowwiseExactWeightGradient(LowPrecision):
    """Like float8-rowwise, and gradients of weights are products in `precision.compute`.

    Nothing is rounded along tokens, so results do not depend on which tokens a rank holds. In the
    gradient of the input the weight has one scale. (torchao's rowwise_with_gw_hp)
    """

    recipe: ClassVar[str] = "float8-rowwise-exact-weight-gradient"


@component("mxfp8")
@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp8(LowPrecision):
    """One power-of-two scale for each 32 numbers along what is reduced; all operands are e4m3.

    (OCP Microscaling Formats v1.0, 2023, sections 5.2 and 6.3) Emulated on every device.
    """

    recipe: ClassVar[str] = "mxfp8"
    multiple: ClassVar[int] = 32

    def problems(self) -> list[Problem]:
        """See `LowPrecisionConfig.problems`."""
        found = LowPrecision.problems(self)
        if self.emulate == "never":
            found.append(
                Problem(
                    "precision.linears.emulate = never, and mxfp8 runs in emulation only",
                    allowed="auto, always",
                    fix="--precision.linears.emulate auto",
                )
            )
        return found
