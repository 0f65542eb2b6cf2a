"""The pass that makes matrix products run in 8 bits, and the list of what it did."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from armillary.foundation.errors import Problem, UserError
from armillary.kernels.float8 import has_float8_units
from armillary.models.layers.embedding import Head
from armillary.models.layers.experts import Experts
from armillary.models.layers.linear import Linear
from armillary.models.layers.router import Router
from armillary.precision.grouped_products import LowPrecisionGroupedProduct
from armillary.precision.low_precision_config import LowPrecision, LowPrecisionConfig
from armillary.precision.products import LowPrecisionProduct, Maximum

_STAY = {
    Head: "the loss is read from its products",
    Router: "it chooses experts, in float32",
}
"""Kinds of modules that multiply by a weight and are never converted, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Which products of a model, or of the parts of one, run in 8 bits."""

    recipe: str = ""
    """Of `precision.linears`; empty: none is asked for."""
    emulated: str = ""
    """Why products of Linears are emulated; empty: the device multiplies 8 bits."""
    converted: tuple[str, ...] = ()
    """Names of modules."""
    experts: int = 0
    """How many of the converted modules are experts, which are emulated on every device."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Names of modules whose products stay as they are, with the reason."""
    unused: tuple[str, ...] = ()
    """Patterns that match nothing."""

    def __add__(self, other: Report) -> Report:
        """Of two parts of one model."""
        return Report(
            recipe=self.recipe,
            emulated=self.emulated,
            converted=self.converted + other.converted,
            experts=self.experts + other.experts,
            left={**self.left, **other.left},
            unused=tuple(pattern for pattern in self.unused if pattern in other.unused),
        )

    def lines(self) -> list[str]:
        """The report for people; nothing if nothing was asked for."""
        if not self.recipe:
            return []
        total = len(self.converted) + len(self.left)
        head = f"{self.recipe}: {len(self.converted)} of {total} modules with matrix products"
        lines = [head + (f", emulated ({self.emulated})" if self.emulated else "")]
        lines += [f"  converted: {names}" for names in _together(self.converted)]
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, why in self.left.items() if why == reason]
            lines += [f"  left as it is: {each} ({reason})" for each in _together(names)]
        if self.experts and not self.emulated:
            lines.append("  of these, experts are rounded, and multiplied at full width")
        lines += [f"  matches nothing here: {pattern}" for pattern in self.unused]
        return lines


def convert_linears(
    model: nn.Module,
    config: LowPrecisionConfig,
    *,
    device: torch.device,
    maximum: Maximum | None = None,
) -> Report:
    """Replaces the products of Linears and experts by those of a recipe. In place, on the instance.

    After the passes that cut weights: whether a matrix can be converted depends on the part that
    is here. Before activation checkpointing, compilation and data sharding, which see the new
    products. Parameters keep their names, shapes and formats.

    Args:
        model: the model, or a part of one; nothing is computed, so `meta` will do.
        config: the recipe, and what to leave out.
        device: where the model will compute.
        maximum: see `products.Maximum`, over the ranks that share matrices (`tp`); None: none do.

    Raises:
        UserError: 8-bit units are asked for that the device does not have.
    """
    report = plan_conversion(model, config, device=device)
    if not isinstance(config, LowPrecision):
        return report
    splits = _splits(model)
    products: dict[str | None, LowPrecisionProduct] = {}
    for name in report.converted:
        module = model.get_submodule(name)
        if isinstance(module, Experts):
            module.product = LowPrecisionGroupedProduct(config.recipe)
            continue
        assert isinstance(module, Linear)
        split = splits.get(name) if maximum is not None else None
        # One object for all that are alike, so that equal blocks share one compilation.
        module.product = products.setdefault(
            split,
            LowPrecisionProduct(
                config.recipe, bool(report.emulated), split, maximum, config.float8_all_gather
            ),
        )
    return report


def plan_conversion(
    model: nn.Module, config: LowPrecisionConfig, *, device: torch.device
) -> Report:
    """What `convert_linears` would do; changes nothing."""
    if not isinstance(config, LowPrecision):
        return Report()
    emulated = _why_emulated(config, device)
    converted: list[str] = []
    left: dict[str, str] = {}
    multiplying: tuple[type[nn.Module], ...] = (Linear, Experts, *_STAY)
    for name, module in model.named_modules():
        if isinstance(module, multiplying):
            if reason := _why_left(name, module, config):
                left[name] = reason
            else:
                converted.append(name)
    names = (*converted, *left)
    patterns = (*config.only, *config.skip)
    return Report(
        recipe=config.recipe,
        emulated=emulated,
        converted=tuple(converted),
        experts=sum(isinstance(model.get_submodule(name), Experts) for name in converted),
        left=left,
        unused=tuple(p for p in patterns if not any(matches(p, name) for name in names)),
    )


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits whole words of a dotted name; * is anything."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _why_emulated(config: LowPrecision, device: torch.device) -> str:
    if config.emulate == "always":
        return "as asked for"
    if config.recipe == "mxfp8":
        return "as mxfp8 is on every device"
    if config.emulate == "auto":
        return "" if has_float8_units(device) else f"{device.type} has no float8 units"
    if device.type == "cpu" or has_float8_units(device):
        return ""
    raise UserError(
        Problem(
            f"precision.linears.emulate = never, and this {device.type} has no float8 units",
            allowed="auto, always (never needs compute capability 8.9 or more)",
            fix="--precision.linears.emulate auto",
        )
    )


def _why_left(name: str, module: nn.Module, config: LowPrecision) -> str:
    for kind, reason in _STAY.items():
        if isinstance(module, kind):
            return reason
    if isinstance(module, Experts) and not config.experts:
        return "precision.linears.experts is false"
    return _not_named(name, config) or next(
        (reason for size in _sizes(module) if (reason := _misfit(*size, config))), ""
    )


def _not_named(name: str, config: LowPrecision) -> str:
    if not any(matches(pattern, name) for pattern in config.only):
        return "no pattern of precision.linears.only matches"
    skipping = [pattern for pattern in config.skip if matches(pattern, name)]
    return f"precision.linears.skip has {skipping[0]}" if skipping else ""


def _misfit(outputs: int, inputs: int, config: LowPrecision) -> str:
    if outputs % config.multiple or inputs % config.multiple:
        return f"{outputs} x {inputs} is not made of multiples of {config.multiple}"
    if not config.small and config.is_small(outputs, inputs):
        return f"{outputs} x {inputs} is small"
    return ""


def _sizes(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Outputs and inputs of the matrices that a module multiplies by, those that are here."""
    if isinstance(module, Experts):
        for weight in (module.gate, module.up, module.down):
            yield weight.shape[1], weight.shape[2]
    else:
        assert isinstance(module, Linear)
        yield module.weight.shape[0], module.weight.shape[1]


def _splits(model: nn.Module) -> dict[str, str]:
    """How tensor parallelism splits Linears, by name, as their regions declare it."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        if getattr(module, "tensor_region", False):
            declared: dict[str, str] = module.tensor_split
            found |= {f"{prefix}.{path}": kind for path, kind in declared.items()}
    return found


def _together(names: Iterable[str]) -> list[str]:
    """Names that differ in a number only, as one line: `layers.*.attention.query x 8`."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return [f"{name} x {count}" if count > 1 else name for name, count in counts.items()]
