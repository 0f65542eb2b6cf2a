"""List, verify, compare, remove and pin the checkpoints of a run.

A run is a folder, its name below runs, a folder of checkpoints, or its address in an object store.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.foundation.errors import EXIT_FAILED, EXIT_FINISHED, Problem, UserError
from armillary.foundation.run_folder import named_run

if TYPE_CHECKING:
    from armillary.checkpoint.compare import Comparison
    from armillary.checkpoint.config import Checkpoint
    from armillary.checkpoint.find import Found
    from armillary.checkpoint.places.place import Place
    from armillary.checkpoint.retention import Shelved

_SHOWN = 20
_KEPT = ("keep_last", "keep_every", "keep_best", "best_metric")
"""What `prune` goes by, of the recipe's part about checkpoints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `list`, `verify`, `diff`, `prune` and `pin`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="one line a checkpoint; files are not read")
    verify = actions.add_parser("verify", help="read every file and compare it with its checksum")
    prune = actions.add_parser("prune", help="remove what is not to be kept")
    pin = actions.add_parser("pin", help="keep checkpoints whatever happens")
    for action in (listing, verify, prune, pin):
        action.add_argument("run", metavar="RUN|PATH|URL", help="a run, or one of its checkpoints")
    diff = actions.add_parser("diff", help="what differs between two checkpoints")
    for name in ("first", "second"):
        diff.add_argument(name, metavar=name.upper(), help="a checkpoint, or a run: its newest")
    prune.epilog = "What is not given is as the run's recipe has it."
    prune.add_argument("--keep-last", type=int, metavar="N", help="newest ones")
    prune.add_argument("--keep-every", type=int, metavar="N", help="and those of every Nth step")
    prune.add_argument("--keep-best", type=int, metavar="N", help="and the N with the best scores")
    prune.add_argument("--best-metric", metavar="SET", help="held-out set of these scores")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    pin.add_argument("steps", nargs="*", type=int, metavar="STEP", help="of a run: which ones")
    pin.add_argument("--unpin", action="store_true", help="no longer keep them")
    for action in (listing, verify, prune, pin, diff):
        action.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the result of one action."""
    actions: dict[str, Callable[[argparse.Namespace], tuple[int, Any, str]]] = {
        "list": _list,
        "verify": _verify,
        "diff": _diff,
        "prune": _prune,
        "pin": _pin,
    }
    code, document, text = actions[arguments.action](arguments)
    print(json.dumps(document, indent=1) if arguments.json else text)
    return code


def _open(address: str) -> tuple[Place, str | None]:
    from armillary.checkpoint.find import open_checkpoints
    from armillary.checkpoint.places.open import is_remote

    if not address.strip():
        raise UserError(Problem("the name of the run is empty", "a run", "armillary runs list"))
    return open_checkpoints(address if is_remote(address) else str(named_run(Path(address))))


def _list(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    from armillary.checkpoint.manifest import Unverified, step_names
    from armillary.checkpoint.places.place import ASIDE
    from armillary.checkpoint.retention import read_pins, shelved_in
    from armillary.cli.table import table
    from armillary.telemetry.format import byte_count

    place, only = _open(arguments.run)
    try:
        pinned = read_pins(place)
    except Unverified as reason:
        raise UserError(Problem(f"{place.address}: {reason}", fix="mend or remove it")) from None
    intact = {each.name: each for each in shelved_in(place)}
    wanted = [name for name in step_names(place).values() if only in (None, name)]
    document = [_entry(name, intact.get(name), pinned) for name in reversed(wanted)]
    rows = [
        (
            entry["name"],
            entry["kind"] + (", pinned" if entry["pinned"] else ""),
            byte_count(entry["bytes"]),
            entry["created"],
            "  ".join(f"{name} {score:.4f}" for name, score in entry["scores"].items()),
        )
        for entry in document
    ]
    aside = [] if only else [name for name in place.folders() if name.startswith(ASIDE)]
    if not (rows or aside or only):
        _require_run_or_checkpoints(arguments.run, place)
    header = ("name", "kind", "size", "created", "bits/byte")
    text = table(header, rows, left=("name", "kind", "bits/byte"))
    if not rows:
        text = f"no checkpoints in {place.address} yet"
    if aside:
        text += f"\nno longer of the run, {len(aside)} set aside: {ASIDE}*"
    return EXIT_FINISHED, document, text


def _require_run_or_checkpoints(address: str, place: Place) -> None:
    """Where there are no checkpoints yet, there is at least a reason to expect some."""
    from armillary.foundation.run_folder import CHECKPOINTS_FOLDER, EVENTS_FILE
    from armillary.resilience.claim import LOCK_NAME

    if place.local is None or _run_of(address, place) is not None:
        return
    signs = (EVENTS_FILE, CHECKPOINTS_FOLDER, LOCK_NAME)
    if place.local.name == CHECKPOINTS_FOLDER or any((place.local / n).exists() for n in signs):
        return
    raise UserError(
        Problem(
            f"{place.address} is neither a run nor a folder of checkpoints",
            "a folder that `armillary train --run` has written, or one with step-00000020 or the"
            " like",
            "armillary runs list",
        )
    )


def _run_of(address: str, place: Place) -> Path | None:
    """The run that an address means, or that a folder of checkpoints lies in."""
    from armillary.checkpoint.places.open import is_remote
    from armillary.foundation.run_folder import RECIPE_FILE, checkpoints_address

    if not is_remote(address):
        run = named_run(Path(address))
        if (run / RECIPE_FILE).is_file():
            return run
    if place.local is None:
        return None
    folder = place.local.absolute()
    is_of_run = (folder.parent / RECIPE_FILE).is_file()
    return (
        folder.parent if is_of_run and checkpoints_address(folder.parent) == str(folder) else None
    )


def _entry(name: str, shelved: Shelved | None, pinned: set[int]) -> dict[str, Any]:
    """One line of the list; without an intact manifest there is little to say."""
    from armillary.checkpoint.manifest import step_of

    manifest = shelved.manifest if shelved else {}
    return {
        "name": name,
        "step": step_of(name),
        "kind": manifest.get("kind", "damaged"),
        "pinned": step_of(name) in pinned,
        "bytes": shelved.bytes if shelved else None,
        "created": manifest.get("created", ""),
        "scores": manifest.get("scores", {}),
        "tokens_total": manifest.get("tokens_total"),
    }


def _verify(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    from armillary.checkpoint.find import path_of
    from armillary.checkpoint.manifest import Unverified, step_names
    from armillary.checkpoint.verify import verify
    from armillary.telemetry.console import open_console
    from armillary.telemetry.format import byte_count

    place, only = _open(arguments.run)
    wanted = [only] if only is not None else list(reversed(step_names(place).values()))
    document, lines, bad = [], [], 0
    with closing(open_console()) as console:
        for name in wanted:
            try:
                files = verify(place, name, console)["files"]
            except Unverified as reason:
                bad += 1
                document.append({"path": path_of(place, name), "verifies": False} | _why(reason))
                lines.append(f"{name}  does not verify: {reason}")
            else:
                size = sum(entry["bytes"] for entry in files.values())
                document.append({"path": path_of(place, name), "verifies": True, "bytes": size})
                lines.append(f"{name}  verifies: {len(files)} files, {byte_count(size)}")
    text = "\n".join(lines) or f"nothing was verified: no checkpoints in {place.address}"
    return EXIT_FAILED if bad or not wanted else EXIT_FINISHED, document, text


def _why(reason: Exception) -> dict[str, str]:
    return {"reason": str(reason)}


def _diff(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    from armillary.checkpoint.compare import compare_checkpoints
    from armillary.telemetry.console import open_console

    with closing(open_console()) as console:
        first, second = _found(arguments.first), _found(arguments.second)
        comparison = compare_checkpoints(first, second, console)
    document = {
        "first": first.path,
        "second": second.path,
        "fields": {name: list(pair) for name, pair in comparison.fields.items()},
        "only_first": list(comparison.names.unexpected),
        "only_second": list(comparison.names.missing),
        "other_shape": list(comparison.names.shapes),
        "other_dtype": list(comparison.names.dtypes),
        "equal_tensors": comparison.equal,
        "tensors": [
            {"name": t.name, "largest": _plain(t.largest), "relative": _plain(t.relative)}
            for t in comparison.tensors
        ],
    }
    return EXIT_FINISHED, document, "\n".join(_diff_lines(comparison))


def _found(address: str) -> Found:
    """The checkpoint that an address means; its files are compared, so they are not verified."""
    from armillary.checkpoint.find import Found
    from armillary.checkpoint.manifest import Unverified, read_manifest
    from armillary.checkpoint.retention import shelved_in

    place, name = _open(address)
    if name is None:
        newest = next(iter(shelved_in(place)), None)
        if newest is None:
            raise UserError(Problem(f"{address}: no intact checkpoint in {place.address}"))
        name = newest.name
    try:
        manifest = read_manifest(place, name)
    except Unverified as reason:
        raise UserError(Problem(f"{address} is not a checkpoint: {reason}")) from None
    return Found(place, name, manifest["step"], manifest, [])


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _diff_lines(comparison: Comparison) -> list[str]:
    from armillary.cli.table import table

    lines = [f"{n}: {a!r:.100} -> {b!r:.100}" for n, (a, b) in comparison.fields.items()]
    kinds = {
        "only in the first": comparison.names.unexpected,
        "only in the second": comparison.names.missing,
        "of another shape": comparison.names.shapes,
        "of another dtype": comparison.names.dtypes,
    }
    lines += [f"{what}: {', '.join(names)}" for what, names in kinds.items() if names]
    if comparison.tensors:
        rows = [
            (each.name, f"{each.largest:.3g}", f"{each.relative:.3g}")
            for each in comparison.tensors[:_SHOWN]
        ]
        lines.append(table(("tensor", "largest", "relative"), rows, left=("tensor",)))
        if (more := len(comparison.tensors) - _SHOWN) > 0:
            lines.append(f"and {more} more")
    lines.append(f"{comparison.equal} tensors are equal, {len(comparison.tensors)} differ")
    return lines


def _prune(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    from armillary.checkpoint.find import path_of
    from armillary.checkpoint.manifest import Unverified, step_names
    from armillary.checkpoint.retention import Shelf
    from armillary.telemetry.format import byte_count

    place, name = _open(arguments.run)
    if name is not None:
        raise UserError(Problem(f"{arguments.run} is one checkpoint", "a run", "armillary runs"))
    run = _run_of(arguments.run, place)
    keep = _kept(arguments, run)
    with ExitStack() as stack:
        if not arguments.dry_run:
            _claim(place, stack)
        newest = max(step_names(place), default=0)
        try:
            removed = Shelf(place, keep).thin(newest, dry_run=arguments.dry_run)
        except Unverified as reason:
            raise UserError(Problem(f"nothing was removed: {reason}", fix="mend it")) from None
    document = [{"path": path_of(place, each.name), "bytes": each.bytes} for each in removed]
    word = "would remove" if arguments.dry_run else "removed"
    lines = [f"{word} {each.name}  {byte_count(each.bytes)}" for each in reversed(removed)]
    text = "\n".join(lines) or "there is nothing to remove"
    if run is None:
        values = [f"--{name.replace('_', '-')} {getattr(keep, name)}" for name in _KEPT]
        text = f"{place.address} belongs to no run here, so kept is: {' '.join(values)}\n{text}"
    return EXIT_FINISHED, document, text


def _kept(arguments: argparse.Namespace, run: Path | None) -> Checkpoint:
    """What stays: as typed, else as the run's recipe has it, else the defaults."""
    from armillary.foundation.run_folder import RECIPE_FILE
    from armillary.recipe.overrides import TableLayer, apply
    from armillary.recipe.recipe import Recipe
    from armillary.recipe.toml import read_toml

    tables = []
    if run is not None:  # of the recipe no more than this: it may need components from elsewhere
        table = read_toml(run / RECIPE_FILE).table.get("checkpoint")
        own = table.items() if isinstance(table, dict) else ()
        kept = {name: value for name, value in own if name in _KEPT}
        tables.append(TableLayer({"checkpoint": kept}, f"in {run / RECIPE_FILE}"))
    typed = {name: getattr(arguments, name) for name in _KEPT}
    typed = {name: value for name, value in typed.items() if value is not None}
    keep = replace(apply(Recipe(), tables).checkpoint, **typed)
    if problems := keep.problems():
        raise UserError([_as_typed(problem) for problem in problems])
    return keep


def _as_typed(problem: Problem) -> Problem:
    """With the options of `prune` in place of those of `train`."""
    fix = (problem.fix or "").replace("--checkpoint.", "--")
    return Problem(problem.message.removeprefix("checkpoint."), problem.allowed, fix)


def _claim(place: Place, stack: ExitStack) -> None:
    """Nothing is removed below a run that is going on, where that can be told."""
    from armillary.foundation.run_folder import RECIPE_FILE
    from armillary.resilience.claim import claim_checkpoints, claim_run

    if place.local is None:
        return
    run = place.local.parent
    is_of_run = (run / RECIPE_FILE).is_file()
    stack.enter_context(claim_run(run) if is_of_run else claim_checkpoints(place.local))


def _pin(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    from armillary.checkpoint.manifest import Unverified, step_names, step_of
    from armillary.checkpoint.retention import read_pins, write_pins

    place, name = _open(arguments.run)
    steps = set(arguments.steps)
    own = None if name is None else step_of(name)
    if own is not None:
        steps.add(own)
    try:
        pinned = read_pins(place)
    except Unverified as reason:
        raise UserError(Problem(f"{place.address}: {reason}", fix="mend or remove it")) from None
    there = set(step_names(place))
    if absent := (set() if arguments.unpin else steps - there):
        message = f"{place.address} has no checkpoint of step {min(absent)}"
        raise UserError(Problem(message, "steps " + ", ".join(map(str, sorted(there)))))
    if steps:
        pinned = pinned - steps if arguments.unpin else pinned | steps
        write_pins(place, pinned)
    shown = ", ".join(map(str, sorted(pinned)))
    text = f"pinned: steps {shown}" if pinned else "nothing is pinned"
    return EXIT_FINISHED, {"pinned": sorted(pinned)}, text
