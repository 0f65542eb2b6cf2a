"""What a recipe says about scale: mesh degrees, activation checkpointing, compilation.

Importing this module loads no torch, so that help is shown at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem
from armillary.precision.config import Precision

DATA_AXES = ("dp_replicate", "dp_shard")
"""Mesh axes over which data is split, outermost first."""

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How the ranks are arranged: a product of axes, each with a degree.

    One axis may be -1, which takes the ranks that the others leave. `dp_shard` alone is FSDP,
    `dp_replicate` alone is DDP, both together are HSDP (shards inside a group, copies between).
    """

    dp_replicate: int = 1
    """Copies of the whole model (ranks, or -1 for all that are left)."""
    dp_shard: int = -1
    """Ranks over which parameters, gradients and optimizer state are split (or -1)."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again for backward:
    less memory, more traffic. Off keeps them until the backward pass."""
    sync_every_microbatch: bool = True
    """Reduce sharded gradients after every microbatch (a shard of memory) and not only after the
    last one (whole gradients in memory, less traffic). Copies always wait for the last one."""
    device: str = "auto"
    """Kind of device: auto (cuda where there is one, else cpu), cpu or cuda."""

    def resolve(self, world_size: int) -> Parallel:
        """The same arrangement with -1 replaced. Only for one without `problems`."""
        left = world_size // math.prod(d for d in self.degrees.values() if d != -1)
        return dataclasses.replace(
            self,
            dp_replicate=left if self.dp_replicate == -1 else self.dp_replicate,
            dp_shard=left if self.dp_shard == -1 else self.dp_shard,
        )

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of each axis as it is written, outermost first."""
        return {axis: getattr(self, axis) for axis in DATA_AXES}

    def problems(self, world_size: int) -> list[Problem]:
        """What keeps this arrangement from covering `world_size` ranks exactly."""
        problems = list(self._malformed())
        if not problems:
            problems = list(self._misfit(world_size))
        if self.device not in DEVICES:
            problems.append(
                Problem(
                    f"parallel.device = {self.device} is no kind of device",
                    allowed=", ".join(DEVICES),
                    fix="--parallel.device auto",
                )
            )
        return problems

    def _malformed(self) -> Iterator[Problem]:
        for axis, degree in self.degrees.items():
            if degree < 1 and degree != -1:
                yield Problem(
                    f"parallel.{axis} = {degree} is not a number of ranks",
                    allowed="1 or more, or -1 for the ranks that the other axes leave",
                    fix=f"{_option(axis)} -1",
                )
        free = [axis for axis, degree in self.degrees.items() if degree == -1]
        if len(free) > 1:
            yield Problem(
                " and ".join(f"parallel.{axis} = -1" for axis in free)
                + " leave the arrangement open",
                allowed="one axis with -1",
                fix=f"{_option(free[0])} 1",
            )

    def _misfit(self, world_size: int) -> Iterator[Problem]:
        fixed = {axis: degree for axis, degree in self.degrees.items() if degree != -1}
        product = math.prod(fixed.values())
        is_open = len(fixed) < len(self.degrees)
        if product == world_size or (is_open and world_size % product == 0):
            return
        # Blame the largest degree whose change alone can make it right.
        for axis in sorted(fixed, key=lambda axis: fixed[axis], reverse=True):
            others = product // fixed[axis]
            if world_size % others:
                continue
            room = world_size // others
            allowed = _divisors(room) if is_open else [room]
            verb = "does not divide the ranks" if is_open else "does not cover the ranks"
            yield Problem(
                f"parallel.{axis} = {fixed[axis]} {verb}: world size {world_size}"
                + (f", other axes take {others}" if others > 1 else ""),
                allowed=f"on {world_size} ranks: {', '.join(map(str, allowed))}",
                fix=f"{_option(axis)} {_closest(fixed[axis], allowed)}",
            )
            return
        text = ", ".join(f"parallel.{axis} = {degree}" for axis, degree in fixed.items())
        yield Problem(
            f"{text}: together {product} ranks, which does not fit a world size of {world_size}",
            allowed=f"degrees whose product {'divides' if is_open else 'is'} {world_size}",
            fix=" ".join([f"{_option('dp_replicate')} 1", f"{_option('dp_shard')} -1"]),
        )


def _option(axis: str) -> str:
    return f"--parallel.{axis.replace('_', '-')}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _closest(wanted: int, allowed: list[int]) -> int:
    """The allowed value nearest by ratio; of two as near, the larger."""
    return min(allowed, key=lambda value: (abs(math.log(value / wanted)), -value))


class ActivationCheckpointConfig(Component):
    """Slot: which activations of a block are kept for the backward pass and which recomputed."""

    __slots__ = ()

    def kept(self, block: int) -> tuple[str, ...] | None:
        """Operators whose results block number `block` keeps.

        None keeps everything (no checkpointing); an empty tuple keeps only the block's inputs.
        """
        raise AssertionError("a component of this slot defines kept()")

    def problems(self) -> list[Problem]:
        """Values that make no sense."""
        return []


@component("none")
@dataclass(frozen=True, kw_only=True, slots=True)
class NoCheckpoint(ActivationCheckpointConfig):
    """Keeps every activation: fastest, most memory."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return None


@component("full")
@dataclass(frozen=True, kw_only=True, slots=True)
class Full(ActivationCheckpointConfig):
    """Recomputes every block in the backward pass. (Chen et al. 2016, arXiv 1604.06174)"""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return ()


@component("every-k")
@dataclass(frozen=True, kw_only=True, slots=True)
class EveryK(ActivationCheckpointConfig):
    """Recomputes every k-th block and keeps the others whole."""

    k: int = 2
    """Of how many blocks one is recomputed (blocks)."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return () if block % self.k == 0 else None

    def problems(self) -> list[Problem]:
        """See `ActivationCheckpointConfig.problems`."""
        if self.k >= 1:
            return []
        return [
            Problem(
                f"activation_checkpoint.k = {self.k} is not a number of blocks",
                allowed="1 or more",
                fix="--activation-checkpoint.k 2",
            )
        ]


COSTLY_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::linear",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    "higher_order::flex_attention",
    "armillary::blocked_attention",
)
"""Matrix products and attention: nearly all of a block's arithmetic."""


@component("selective")
@dataclass(frozen=True, kw_only=True, slots=True)
class Selective(ActivationCheckpointConfig):
    """Keeps the results of costly operators and recomputes the cheap ones between them.

    (Korthikanti et al. 2022, arXiv 2205.05198)
    """

    save: tuple[str, ...] = COSTLY_OPERATORS
    """Operators whose results are kept, as namespace::name."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return self.save

    def problems(self) -> list[Problem]:
        """See `ActivationCheckpointConfig.problems`."""
        own = [name for name in self.save if name not in COSTLY_OPERATORS]
        if not own:
            return []
        from armillary.parallel.operators import operator_problems  # it asks torch

        return operator_problems(own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """Compilation with torch.compile, one block at a time."""

    enabled: bool = False
    """Compile the blocks."""
    backend: str = "inductor"
    """Compiler: inductor, or aot_eager to look for faults without generating code."""
    mode: str = "default"
    """Inductor's mode: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs."""

    def problems(self) -> list[Problem]:
        """Values that torch.compile does not know, or that do not go together."""
        unknown = [
            Problem(
                f"compile.{name} = {value} is not known",
                allowed=", ".join(known),
                fix=f"--compile.{name} {known[0]}",
            )
            for name, value, known in (
                ("backend", self.backend, ("inductor", "aot_eager", "eager", "cudagraphs")),
                (
                    "mode",
                    self.mode,
                    ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
                ),
            )
            if value not in known
        ]
        if unknown or self.backend == "inductor" or self.mode == "default":
            return unknown
        return [
            Problem(
                f"compile.mode = {self.mode} is inductor's, and compile.backend = {self.backend}",
                allowed="default, or compile.backend = inductor",
                fix="--compile.mode default",
            )
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The part of a recipe that is applied to a model from outside."""

    parallel: Parallel = field(default_factory=Parallel)
    """Arrangement of the ranks."""
    precision: Precision = field(default_factory=Precision)
    """Number formats."""
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=NoCheckpoint)
    """What is kept for the backward pass."""
    compile: Compile = field(default_factory=Compile)
    """Compilation."""
