"""Compare recipes, or runs: who has the lower loss, and whether that is more than chance.

Recipes are trained under one budget with several seeds, in turn; the same command goes on after an
interruption. `armillary compare A --LEAF VALUE B --LEAF VALUE`: leaves before the first recipe are
for all, leaves after one for that one. Run folders are taken as they are; those that differ by seed
alone count as one recipe.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.parser import Parser, RecipeTokens
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError

if TYPE_CHECKING:
    from armillary.analysis.comparison import Comparison
    from armillary.analysis.contenders import Contender
    from armillary.analysis.plan import Entry, Limit, Plan

UNITS = ("steps", "tokens", "flops", "seconds")
_FOLDER = "comparisons"
_JSON, _PAGE = "compare.json", "compare.html"


def add_arguments(parser: Parser) -> None:
    """Adds this command's arguments."""
    parser.takes_recipe("RECIPE|RUN [--LEAF VALUE ...] RECIPE|RUN ...")
    add = parser.add_argument
    add("--seeds", type=int, default=3, metavar="N", help="runs of each recipe (default: 3)")
    for unit in UNITS:
        add(f"--budget.{unit}", metavar="N", help=f"{unit} of every run")
    add("--nproc", type=int, default=1, metavar="N", help="ranks of each run (default: 1)")
    add("--sweep", action="append", default=[], metavar="LEAF=V,V", help=_SWEEP_HELP)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--grid", action="store_true", help="all points of the sweeps (the default)")
    way.add_argument("--random", type=int, metavar="N", help="N points of the sweeps, at random")
    add("--out", metavar="DIR", help="folder of the comparison (default: comparisons/NAME-HASH)")
    add("--again-failed", action="store_true", help="train runs that failed once more")
    add("--thin", action="store_true", help="delete the checkpoints of each run that has finished")
    add("--target-loss", type=float, metavar="X", help="time how soon it is reached, in the unit"
        " of the verdict (default: the lowest that every run reaches)")  # fmt: skip
    add("--price-per-hour", type=float, metavar="P", help="of all devices of a run, for the costs")
    add("--json", action="store_true", help="print one JSON document")
    add("--html", nargs="?", const=_PAGE, metavar="FILE", help="write the page there too")


_SWEEP_HELP = (
    "several recipes from each: LEAF=V,V,... or LEAF~log:LOW:HIGH[:COUNT] (or ~linear); repeatable"
)


def run(arguments: argparse.Namespace) -> int:
    """Trains what is to be trained, and shows the comparison.

    Raises:
        UserError: with all problems at once; nothing was started.
        RunError: a recipe could not be trained.
        Stopped: a stop was asked for; the same command goes on.
    """
    from armillary.analysis.comparison import compare

    _require_sensible(arguments)
    groups = _groups(arguments.recipe_tokens)
    folders = [Path(words[0]) for words in groups if _is_folder(words[0])]
    if any(_is_folder(words[0]) and len(words) > 1 for words in groups):
        raise UserError(Problem("a run is as it is: no values can be set on one", fix="a recipe"))
    trained, plan = _trained(groups, arguments)
    begun = _begun(folders)
    contenders = _beside([*trained, *_of_folders(folders)])
    if begun and len(contenders) < 2:
        raise UserError(begun)
    for problem in begun:
        _say(f"note: {problem.message}; to go on: {problem.fix}")
    comparison = compare(
        contenders,
        target_loss=arguments.target_loss,
        price_per_hour=arguments.price_per_hour,
        notes=_notes(plan, trained),
    )
    _show(comparison, arguments, plan)
    return EXIT_FINISHED


def _require_sensible(arguments: argparse.Namespace) -> None:
    found = []
    if arguments.seeds < 1:
        found.append(Problem(f"--seeds {arguments.seeds}", "1 or more", "--seeds 3"))
    if arguments.nproc < 1:
        found.append(Problem(f"--nproc {arguments.nproc}", "1 or more", "--nproc 1"))
    if (arguments.grid or arguments.random is not None) and not arguments.sweep:
        found.append(Problem("a grid or random points of no sweep", fix="--sweep LEAF=V,V"))
    if arguments.target_loss is not None and not math.isfinite(arguments.target_loss):
        found.append(Problem(f"--target-loss {arguments.target_loss}", "a loss", "--target-loss 1"))
    if arguments.html is not None and Path(arguments.html).suffix not in (".html", ".htm"):
        message = f"--html {arguments.html}: what follows is taken for its file"
        found.append(Problem(message, "a name that ends in .html", f"--html={_PAGE}"))
    if arguments.price_per_hour is not None and not 0 <= arguments.price_per_hour < 1e12:
        found.append(Problem(f"--price-per-hour {arguments.price_per_hour}", "0 or more"))
    if found:
        raise UserError(found)


def _limit(arguments: argparse.Namespace) -> Limit:
    from armillary.analysis.plan import Limit

    given = {unit: value for unit in UNITS if (value := getattr(arguments, f"budget.{unit}"))}
    if len(given) > 1:
        names = " and ".join(f"--budget.{unit}" for unit in given)
        raise UserError(Problem(f"{names}: two budgets", "one of them"))
    for unit, text in given.items():
        try:
            amount = float(text.replace("_", ""))
        except ValueError:
            amount = 0.0
        whole = unit in ("flops", "seconds") or amount == amount // 1
        if not 0 < amount < 1e30 or not whole:
            raise UserError(Problem(f"--budget.{unit} {text}", "a number above 0, as 1e6"))
        return Limit(unit=unit, amount=amount)
    return Limit()


def _groups(tokens: RecipeTokens) -> list[RecipeTokens]:
    """What was typed for each recipe or run: its word, what is for all, what is for it alone."""
    common: list[str] = []
    groups: list[list[str]] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            groups.append([token])
            continue
        target = groups[-1] if groups else common
        target.append(token)
        negated = token.startswith(("--no-", "--no_"))
        if "=" not in token and not negated and rest and not rest[0].startswith("--"):
            target.append(rest.pop(0))
    made = []
    for word, *own in groups:
        group = RecipeTokens([word, *own] if _is_folder(word) else [word, *common, *own])
        group.own_options = tokens.own_options
        made.append(group)
    return made


def _is_folder(word: str) -> bool:
    """Whether a word names a run, or a comparison; the name of a recipe is the recipe's."""
    from armillary.analysis.plan import PLAN_FILE
    from armillary.foundation.run_folder import EVENTS_FILE, named_run
    from armillary.recipe.registry import names

    if not Path(word).exists() and word in names():
        return False
    folder = named_run(Path(word))
    return (folder / EVENTS_FILE).is_file() or (folder / PLAN_FILE).is_file()


def _entries(groups: Sequence[RecipeTokens], arguments: argparse.Namespace) -> tuple[Entry, ...]:
    from armillary.analysis.plan import entries_of
    from armillary.analysis.sweep import expand, parse_axis
    from armillary.cli.recipe_arguments import resolve

    points = expand([parse_axis(text) for text in arguments.sweep], draws=arguments.random)
    words, recipes = [], []
    for group in groups:
        for point in points:
            tokens = RecipeTokens([*group, *(f"--{leaf}={value}" for leaf, value in point)])
            tokens.own_options = group.own_options
            resolved = resolve(tokens)
            words.append(resolved.name)
            recipes.append(resolved.recipe)
    return entries_of([_short(word) for word in words], recipes)


def _short(word: str) -> str:
    """A recipe's own name: without the folder, the suffix or the module it is in."""
    return Path(word.removesuffix(".toml").rpartition(":")[2]).name


def _trained(
    groups: Sequence[RecipeTokens], arguments: argparse.Namespace
) -> tuple[list[Contender], Plan | None]:
    """Trains the recipes among what was typed; nothing where there are runs alone."""
    from armillary.analysis.carrying_out import contenders_in, measure_probes, train_all
    from armillary.analysis.plan import Plan
    from armillary.launch.forwarding import Forwarding
    from armillary.launch.local import Ended, run_once

    wanted = [group for group in groups if not _is_folder(group[0])]
    if not wanted:
        if not groups:
            fix = "armillary compare debug debug --optimizer.lr 1e-3"
            raise UserError(Problem("there is nothing to compare", "recipes or runs", fix))
        return [], None
    entries = _entries(wanted, arguments)
    if len(entries) + len(groups) - len(wanted) < 2:
        fix = "a second recipe or run, or --sweep LEAF=V,V"
        raise UserError(Problem("there is nothing to compare: one recipe", fix=fix))
    plan = Plan(
        folder=Path(arguments.out or _default_folder(entries, arguments)).expanduser(),
        entries=entries,
        seeds=arguments.seeds,
        limit=_limit(arguments),
        nproc=arguments.nproc,
        command=shlex.join(["armillary", *arguments.argv]),
    )
    _require_trainable(plan)
    try:
        plan.load_progress()
        plan.save()
    except OSError as error:
        message = f"--out {plan.folder}: cannot be used: {error.strerror}"
        raise UserError(Problem(message, "a folder that can be written", "another --out")) from None
    with Forwarding() as signals:

        def start(argv: list[str], nproc: int) -> Ended:
            return run_once(argv, nproc, signals=signals)

        measure_probes(plan, start, _say)
        _require_trainable(plan)
        train_all(plan, start, _say, again_failed=arguments.again_failed, thin=arguments.thin)
    return contenders_in(plan), plan


def _default_folder(entries: Sequence[Entry], arguments: argparse.Namespace) -> Path:
    """The same command finds its own comparison again."""
    import hashlib

    from armillary.recipe.plain import recipe_sha256

    limit = _limit(arguments)
    parts = [recipe_sha256(entry.recipe) for entry in entries]
    parts += [limit.unit, repr(limit.amount), str(arguments.seeds), str(arguments.nproc)]
    name = "-".join(dict.fromkeys(entry.name.partition(" ")[0] for entry in entries[:3]))
    return Path(_FOLDER) / f"{name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:8]}"


def _require_trainable(plan: Plan) -> None:
    """Raises UserError with all problems of all recipes, each named by its recipe."""
    from armillary.analysis.plan import limited, probing
    from armillary.recipe.problems import problems

    found: dict[Problem, None] = {}
    for entry in plan.entries:
        probe = plan.probes.get(entry.key)
        is_known = probe is not None or not plan.limit.needs_probe
        recipe = limited(entry.recipe, plan.limit, probe) if is_known else probing(entry.recipe)
        for problem in problems(recipe, plan.nproc, more_ranks="--nproc"):
            message = f"{entry.name}: {problem.message}"
            found[Problem(message, problem.allowed, problem.fix)] = None
    if found:
        raise UserError(found)


def _of_folders(folders: Sequence[Path]) -> list[Contender]:
    """Runs, and all runs of earlier comparisons."""
    from armillary.analysis.contenders import contenders_of
    from armillary.analysis.plan import PLAN_FILE, read_plan
    from armillary.foundation.run_folder import named_run

    ended: dict[Path, int] = {}
    names: dict[Path, str] = {}
    found: list[Path] = []
    for each in folders:
        if (each / PLAN_FILE).is_file():
            plan = read_plan(each / PLAN_FILE)
            called = {recipe["key"]: recipe["name"] for recipe in plan["recipes"]}
            for name, code in plan["ended"].items():
                folder = each / "runs" / name
                ended[folder], names[folder] = code, called[name.partition("/")[0]]
                found.append(folder)
        else:
            found.append(named_run(each))
    return contenders_of(found, ended, names)


def _begun(folders: Sequence[Path]) -> list[Problem]:
    """Comparisons among the folders that are not through, and the commands that go on."""
    from armillary.analysis.plan import PLAN_FILE, read_plan

    found = []
    for each in folders:
        if (each / PLAN_FILE).is_file():
            plan = read_plan(each / PLAN_FILE)
            runs, ended = len(plan["recipes"]) * plan["seeds"], len(plan["ended"])
            if ended < runs:
                message = f"the comparison {each} is not through: {ended} of {runs} runs are done"
                fix = plan.get("command") or "the command that began it"
                found.append(Problem(message, fix=fix))
    return found


def _beside(contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders with signs of their own, in order."""
    from dataclasses import replace

    from armillary.analysis.contenders import key_of

    return [replace(each, key=key_of(place)) for place, each in enumerate(contenders)]


def _notes(plan: Plan | None, trained: Sequence[Contender]) -> list[str]:
    """How the runs were made."""
    if plan is None:
        return []
    limit = plan.limit
    if not limit.unit:
        return ["each recipe was trained with its own budget"]
    text = f"budget of every run: {limit.amount:.6g} {limit.unit}"
    if limit.unit == "seconds":
        text += ", as the steps that a probe of a few took beforehand: the schedule ends with them"
        found = [run.seconds for each in trained for run in each.runs if run.outcome == "finished"]
        if found:
            text += f"; the runs took {min(found):.3g} to {max(found):.3g} seconds"
    elif limit.unit == "flops":
        text += ", rounded to whole steps"
    return [text]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(comparison: Comparison, arguments: argparse.Namespace, plan: Plan | None) -> None:
    """The table or the document; files where there is a folder, or where they were asked for."""
    import json

    from armillary.analysis.carrying_out import checkpoint_bytes
    from armillary.analysis.document import document_of
    from armillary.analysis.page.page import page_of
    from armillary.cli.compare_text import comparison_text
    from armillary.foundation.files import write_atomically
    from armillary.telemetry.format import byte_count

    document = json.dumps(document_of(comparison), indent=1, allow_nan=False)
    pages = [] if plan is None else [plan.folder / _PAGE]
    if arguments.html:
        pages.append(Path(arguments.html))
    path = Path() if plan is None else plan.folder / _JSON
    try:
        if plan is not None:
            write_atomically(path, document + "\n")
        for path in pages:
            write_atomically(path, page_of(comparison).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(Problem(f"{path} cannot be written: {error.strerror}")) from error
    print(document if arguments.json else comparison_text(comparison))
    for path in pages:
        _say(f"page: {path}")
    if plan is not None and (kept := checkpoint_bytes(plan)):
        _say(f"checkpoints: {byte_count(kept)} below {plan.folder}; the same command with --thin"
             " deletes those of finished runs")  # fmt: skip
