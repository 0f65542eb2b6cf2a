"""The tasks of lm-eval (extra `eval`), asked of a live model on any mesh, without a network.

Rank 0 runs lm-eval; the other ranks compute along (`lm_eval_ranks`) and never load it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from armillary.checkpoint.ranks import describe
from armillary.foundation.errors import (
    ArmillaryError,
    Problem,
    RunError,
    UserError,
    missing_extra,
    nearest,
)
from armillary.foundation.progress import Progress
from armillary.inference.lm_eval_ranks import Company
from armillary.inference.served import Served

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def require_lm_eval() -> None:
    """Loads it, told to stay away from networks.

    Raises:
        UserError: it is not installed.
    """
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise missing_extra("eval", "--lm-eval") from error


def ask_lm_eval(
    trained: Served,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """The figures of tasks of lm-eval, by task; called on each rank, the same on each.

    Args:
        trained: the model.
        tasks: names of tasks, groups or tags.
        folder: of YAML files with further tasks. Such a file can name code, which is run.
        limit: items of each task; None: all.
        shots: solved items before each; None: as the task has it.
        progress: hears of what takes long.

    Raises:
        UserError: lm-eval is not there, or has no such task.
        RunError: a task failed; it may need a network.
    """
    company = Company(trained, progress)
    outcome: list[dict[str, Any] | ArmillaryError] = []
    if trained.model.mesh.is_main:

        def work() -> None:
            try:
                outcome.append(_evaluate(company, tasks, folder, limit, shots))
            except ArmillaryError as error:
                outcome.append(error)
            except Exception as error:
                words = f"lm-eval: {describe(error)}"
                hint = "tasks whose data is on this machine; no network is used"
                outcome.append(RunError(Problem(words, hint)))

        company.lead(work)
    else:
        company.follow()

    def tell() -> dict[str, Any]:
        if isinstance(outcome[0], ArmillaryError):
            raise outcome[0]
        return outcome[0]

    return trained.ranks.on_main(tell)


def _evaluate(
    company: Company,
    tasks: Sequence[str],
    folder: str | None,
    limit: int | None,
    shots: int | None,
) -> dict[str, Any]:
    require_lm_eval()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from armillary.inference.lm_eval_model import Adapter

    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # ours is for figures
        manager = TaskManager(include_path=folder)
        if unknown := [name for name in tasks if name not in manager.all_tasks]:
            close = nearest(unknown[0], manager.all_tasks)
            message = f"lm-eval has no task {', '.join(map(repr, unknown))}"
            allowed = "a task that it has, or one in the folder of --lm-eval-path"
            raise UserError(Problem(message, allowed, f"--lm-eval {close}" if close else None))
        found: Any = simple_evaluate(
            model=Adapter(company),
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=shots,
            limit=limit,
            log_samples=False,
        )
    seconds = time.perf_counter() - began
    counts = found.get("n-samples", {})
    return {
        name: {
            "metrics": _figures(figures, errors=False),
            "errors": _figures(figures, errors=True),
            "items": counts.get(name, {}).get("effective", 0),
            "seconds": seconds,
        }
        for name, figures in found["results"].items()
    }


def _figures(found: dict[str, Any], *, errors: bool) -> dict[str, float | None]:
    """lm-eval's `acc,none` and `acc_stderr,none` as numbers by the name of the metric.

    None stands for what JSON has no number for.
    """
    figures: dict[str, float | None] = {}
    for key, value in found.items():
        metric, comma, kind = key.partition(",")
        is_error = metric.endswith("_stderr")
        if not comma or is_error != errors or not isinstance(value, int | float):
            continue
        name = metric.removesuffix("_stderr")
        figures[name if kind == "none" else f"{name},{kind}"] = (
            float(value) if math.isfinite(value) else None
        )
    return figures
