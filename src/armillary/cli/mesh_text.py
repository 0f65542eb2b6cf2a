"""The books of a mesh as a page of text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from armillary.cli.table import table
from armillary.telemetry.format import byte_count, count_of, percent, quantity


def page(facts: dict[str, Any]) -> str:
    """The facts that `mesh_command` has gathered, for people."""
    parts = [_title(facts), *([_stages(facts)] if len(facts["stages"]) > 1 else [])]
    if "rank" in facts:
        parts += [_place(facts["rank"]), _tensors(facts["rank"]["tensors"])]
    else:
        parts += [*([_groups(facts)] if facts["groups"] else []), _roles(facts["roles"])]
    return "\n\n".join(parts)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: `0-3`, `0 64 128 .. 448` where evenly spaced, else all."""
    if len(numbers) < 3:
        return " ".join(map(str, numbers))
    step = numbers[1] - numbers[0]
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1, max(1, step))):
        if step == 1:
            return f"{numbers[0]}-{numbers[-1]}"
        shown = " ".join(map(str, numbers[:3]))
        return f"{shown} .. {numbers[-1]}" if len(numbers) > 4 else " ".join(map(str, numbers))
    return " ".join(_runs(numbers))


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Runs of consecutive numbers; of many runs the first ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    most = 4
    for run in runs[:most]:
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
    if len(runs) > most:
        yield f".. {numbers[-1]}"


def _title(facts: dict[str, Any]) -> str:
    axes = {axis: degree for axis, degree in facts["axes"].items() if degree > 1}
    mesh = ": " + ", ".join(f"{axis} {degree}" for axis, degree in axes.items()) if axes else ""
    parts = facts["data_size"]
    shared = facts["world_size"] // parts
    alike = f", the same to {shared} ranks each" if shared > 1 else ""
    return (
        f"{facts['recipe']} on {count_of(facts['world_size'], 'rank')}{mesh}\n"
        f"{quantity(facts['parameters'])} parameters; the rows of a batch are dealt in "
        f"{count_of(parts, 'part')}{alike}"
    )


def _stages(facts: dict[str, Any]) -> str:
    rows = [
        (
            str(stage["stage"]),
            str(stage["pipeline_rank"]),
            f"{spans([int(name) for name in stage['layers']])} ({len(stage['layers'])})",
            percent(stage["cost_share"]),
        )
        for stage in facts["stages"]
    ]
    header = ("stage", "on pp", "layers", "estimated work")
    return f"pipeline, schedule {facts['schedule']}\n" + table(header, rows, ("layers",))


def _groups(facts: dict[str, Any]) -> str:
    rows = [(axis, str(len(ranks)), spans(ranks)) for axis, ranks in facts["groups"].items()]
    header = ("axis", "ranks", "group of rank 0")
    return table(header, rows, ("axis", "group of rank 0"))


_HEADER = ("parameters", "weights", "gradients", "optimizer", "together")


def _holding(held: dict[str, Any]) -> tuple[str, ...]:
    kinds = held["bytes"]
    counts = [kinds["parameters"], kinds["gradients"], kinds["optimizer"], sum(kinds.values())]
    return (quantity(held["parameters"]), *map(byte_count, counts))


def _roles(roles: list[dict[str, Any]]) -> str:
    rows = [
        (
            spans(role["ranks"]),
            str(len(role["ranks"])),
            " ".join(role["stages"]),
            _layers(role),
            *_holding(role),
        )
        for role in roles
    ]
    header = ("ranks", "number", "stages", "layers", *_HEADER)
    told = "held by each rank, all in float32; activations are not counted\n"
    return told + table(header, rows, ("ranks", "stages", "layers"))


def _layers(held: dict[str, Any]) -> str:
    return ", ".join(spans([int(name) for name in names]) for names in held["stages"].values())


def _place(rank: dict[str, Any]) -> str:
    rows = [
        (axis, str(rank["coordinates"][axis]), str(len(ranks)), spans(ranks))
        for axis, ranks in rank["groups"].items()
    ]
    lines = [f"rank {rank['rank']}, part {rank['data_rank']} of each batch"]
    if rows:
        lines.append(table(("axis", "place", "of", "ranks"), rows, ("axis", "ranks")))
    if rank["receives_from"] or rank["sends_to"]:
        lines.append(
            f"receives from {_ranks(rank['receives_from'])}, sends to {_ranks(rank['sends_to'])}"
        )
    lines.append(f"layers {_layers(rank)}")
    holding = dict(zip(_HEADER, _holding(rank), strict=True))
    lines.append(", ".join(f"{name} {value}" for name, value in holding.items()))
    return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank {' and '.join(map(str, ranks))}" if ranks else "no rank"


def _tensors(tensors: list[dict[str, Any]]) -> str:
    """One line for tensors that are alike in every layer that has one."""
    alike: Counter[tuple[str, str, str, str]] = Counter()
    for each in tensors:
        name = re.sub(r"(?<=layers\.)\d+", "*", each["name"], count=1)
        alike[name, _shape(each["shape"]), _shape(each["local_shape"]), str(each["moments"])] += 1
    rows = [(*key, str(count)) for key, count in alike.items()]
    header = ("parameter", "whole", "here", "moments", "tensors")
    return table(header, rows, ("parameter", "whole", "here"))


def _shape(shape: list[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
