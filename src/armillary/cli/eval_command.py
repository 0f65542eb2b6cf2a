"""Ask a trained model tasks: `armillary eval RUN`; without --tasks, those of its recipe.

Where the recipe has none, small ones that come with the package are asked. Any value of the recipe
can be set for it: the mesh (--parallel.tp 2), a task (--evaluation.tasks.0 cloze
--evaluation.tasks.0.files mine.jsonl). The run is only read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli import ranks_wanted
from armillary.cli.parser import Parser
from armillary.cli.served_arguments import run_of, takes_run
from armillary.cli.table import table
from armillary.foundation.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    Problem,
    UserError,
    nearest,
)
from armillary.foundation.tell import seen_by_every_rank

if TYPE_CHECKING:
    from armillary.evaluation.config import EvaluationTask
    from armillary.inference.evaluate import Answered, Failed
    from armillary.inference.served import Served
    from armillary.recipe.overrides import Option


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    takes_run(parser)
    add = parser.add_argument
    add("--tasks", metavar="NAME,...", help="tasks of the recipe by name, or kinds of tasks")
    add("--limit", metavar="N", type=int, help="items of each task, the first ones (default: all)")
    add("--step", metavar="N", type=int, help="checkpoint of this step (the newest that verifies)")
    add("--lm-eval", metavar="TASK,...", help="tasks of lm-eval instead, without a network")
    add("--lm-eval-path", metavar="DIR", help="folder of further lm-eval tasks; their code is run")
    add("--lm-eval-shots", metavar="N", type=int, help="solved items before each of lm-eval's")
    ranks_wanted.add_arguments(parser)
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the figures; 1 where a task failed."""
    with seen_by_every_rank():
        path, options = run_of(arguments, "eval")
        ranks = ranks_wanted.ranks_wanted(arguments)
        if found := [*ranks.problems(), *_problems(arguments)]:
            raise UserError(found)
        tasks = _tasks(arguments, path, options)
    if not ranks.started:
        from armillary.launch.local import launch

        return launch(arguments.argv, ranks.nproc, place=ranks.place)
    from armillary.inference.served import served
    from armillary.parallel import process
    from armillary.telemetry.console import open_console

    more_ranks = "--nproc" if arguments.nproc is None and ranks.world_size == 1 else ""
    quiet = "off" if arguments.json else "auto"
    with (
        closing(open_console(quiet, rank=process.rank())) as console,
        served(
            path, options, step=arguments.step, more_ranks=more_ranks, progress=console
        ) as trained,
    ):
        if process.is_main():
            for reason in trained.checkpoint.reasons[:-1]:  # the last is why this one was taken
                print(f"note: {reason}", file=sys.stderr)
        if arguments.lm_eval:
            document = _ask_lm_eval(trained, arguments, console)
        else:
            document = _ask(trained, tasks, console)
    if process.is_main():
        print(json.dumps(document, indent=1) if arguments.json else _page(document))
        sys.stdout.flush()
    return EXIT_FAILED if document["failed"] else EXIT_FINISHED


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    found = []
    if arguments.limit is not None and arguments.limit < 1:
        found.append(Problem(f"--limit {arguments.limit}", "1 or more, or leave it out"))
    further = (arguments.lm_eval_path, arguments.lm_eval_shots)
    if arguments.lm_eval is None and further != (None, None):
        message = "--lm-eval-path and --lm-eval-shots are for tasks of lm-eval, and none is given"
        found.append(Problem(message, fix="--lm-eval TASK"))
    if (arguments.lm_eval_shots or 0) < 0:
        found.append(Problem(f"--lm-eval-shots {arguments.lm_eval_shots}", "0 or more"))
    if arguments.lm_eval is not None and not arguments.lm_eval.strip():
        found.append(Problem("--lm-eval is empty", "names of tasks of lm-eval"))
    if arguments.lm_eval is not None and arguments.tasks is not None:
        found.append(Problem("--tasks and --lm-eval are both given", "one of them"))
    folder = arguments.lm_eval_path
    if folder is not None and not (folder and Path(folder).is_dir()):
        found.append(Problem(f"--lm-eval-path {folder} is not a folder", "a folder"))
    return found


def _tasks(
    arguments: argparse.Namespace, path: Path, options: list[Option]
) -> list[EvaluationTask]:
    """What was asked for: by name those of the recipe, by kind the ones that are bundled.

    Raises:
        UserError: there is no such run or task, or the values of one are wrong.
    """
    from armillary.evaluation.config import EvaluationTask
    from armillary.foundation.component import choices_of
    from armillary.inference.served import served_recipe

    recipe = served_recipe(path, options, step=arguments.step)
    if arguments.lm_eval is not None:
        from armillary.inference.lm_eval import require_lm_eval

        require_lm_eval()
        return []
    kinds = choices_of(EvaluationTask).items()
    known: dict[str, EvaluationTask] = {
        name: kind() for name, kind in kinds if kind.__module__.startswith("armillary.")
    }
    own = {task.name: task for task in recipe.evaluation.tasks}
    words = list(own or known)
    if arguments.tasks is not None:
        words = [word.strip() for word in arguments.tasks.split(",")]
    known |= own
    if unknown := [word for word in words if word not in known]:
        close = nearest(unknown[0], known)
        message = f"--tasks: there is no task {', '.join(map(repr, unknown))}"
        fix = f"--tasks {close}" if close else "--evaluation.tasks.0 KIND, and its fields"
        raise UserError(Problem(message, ", ".join(sorted(known)), fix))
    chosen = [known[word] for word in dict.fromkeys(words)]
    if arguments.limit is not None:
        chosen = [_limited(task, arguments.limit) for task in chosen]
    settings = dataclasses.replace(recipe.evaluation, tasks=tuple(chosen))
    context = getattr(recipe.model, "max_seq_len", None)
    if found := settings.problems(recipe.budget.seq_len, context):
        raise UserError(found)
    return chosen  # a file that is not there fails its own task, as one that is bad


def _limited(task: EvaluationTask, limit: int) -> EvaluationTask:
    changed: Any = dataclasses.replace(task, limit=limit)  # type: ignore[type-var]  # every component is a dataclass
    assert isinstance(changed, type(task))
    return changed


def _ask(trained: Served, tasks: Sequence[EvaluationTask], console: Any) -> dict[str, Any]:
    """Every rank asks; the document is the same on each."""
    from armillary.inference.evaluate import Evaluator

    evaluator = Evaluator.of(
        trained.recipe,
        trained.model,
        trained.tokenizer,
        ranks=trained.ranks,
        sums=trained.sums,
        progress=console,
    )
    answers = {task.name: evaluator.run(task) for task in tasks}
    return _document(trained, answers)


def _document(trained: Served, answers: dict[str, Answered | Failed]) -> dict[str, Any]:
    from armillary.inference.evaluate import Answered

    return {
        "checkpoint": trained.checkpoint.path,
        "step": trained.checkpoint.step,
        "mesh": trained.model.mesh.axes,
        "tasks": {
            name: {
                "metrics": {m.name: _finite(m.value) for m in answer.measured.metrics},
                "errors": {
                    m.name: _finite(m.error) for m in answer.measured.metrics if m.error is not None
                },
                "items": answer.measured.items,
                "seconds": answer.seconds,
            }
            for name, answer in answers.items()
            if isinstance(answer, Answered)
        },
        "failed": {
            name: answer.words
            for name, answer in answers.items()
            if not isinstance(answer, Answered)
        },
    }


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def _ask_lm_eval(trained: Served, arguments: argparse.Namespace, console: Any) -> dict[str, Any]:
    from armillary.inference.lm_eval import ask_lm_eval

    found = ask_lm_eval(
        trained,
        [word.strip() for word in arguments.lm_eval.split(",")],
        folder=arguments.lm_eval_path,
        limit=arguments.limit,
        shots=arguments.lm_eval_shots,
        progress=console,
    )
    return _document(trained, {}) | {"tasks": found}


def _page(document: dict[str, Any]) -> str:
    from armillary.telemetry.format import number

    rows = []
    for name, found in document["tasks"].items():
        for metric, value in found["metrics"].items():
            error = found["errors"].get(metric)
            spread = "" if error is None else f"+- {error:.4f}"
            rows.append((name, metric, number(value, ".4f"), spread, str(found["items"])))
    lines = [f"{document['checkpoint']}, step {document['step']}"]
    if rows:
        header, left = ("task", "metric", "value", "error", "items"), ("task", "metric", "error")
        lines.append(table(header, rows, left))
    lines += [f"failed: {name}: {words}" for name, words in document["failed"].items()]
    return "\n".join(lines)
