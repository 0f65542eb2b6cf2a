"""torch's operators by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from armillary.foundation.errors import Problem, nearest


def operators_named(names: Sequence[str]) -> list[object]:
    """The operators of those names, with all their overloads, without those not loaded here."""
    found: list[object] = []
    for name in names:
        namespace, _, operator = name.partition("::")
        if namespace == "higher_order":
            found += [op for op in [getattr(torch.ops.higher_order, operator, None)] if op]
            continue
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


def operator_problems(names: Sequence[str]) -> list[Problem]:
    """A problem for each name that no loaded operator has."""
    return [
        Problem(
            f"activation_checkpoint.save names {name!r}, and torch has no such operator",
            allowed="namespace::name, such as aten::mm",
            fix=f"--activation-checkpoint.save '[\"{near}\"]'" if near else None,
        )
        for name in names
        if len([part for part in name.split("::") if part]) != 2 or not operators_named([name])
        for near in [nearest(name, known_operators())]
    ]


def known_operators() -> set[str]:
    """The names of all operators of this process, without their overloads."""
    return {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
