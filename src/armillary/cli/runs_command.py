"""List runs, or show one: what it learned, where its time went, what it kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from armillary.foundation.errors import EXIT_FINISHED, ArmillaryError, Problem, UserError
from armillary.foundation.run_folder import RUNS_FOLDER, named_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = commands.add_parser("list", help="one line a run")
    listing.add_argument(
        "folder", nargs="?", default=RUNS_FOLDER, help="holds run folders (default: runs)"
    )
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    showing = commands.add_parser("show", help="one run in full")
    showing.add_argument("run", help="a run folder, or its name below runs")
    showing.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the list or the run."""
    if arguments.action == "list":
        return _list(Path(arguments.folder), as_json=arguments.json)
    return _show(Path(arguments.run), as_json=arguments.json)


def _list(folder: Path, *, as_json: bool) -> int:
    from armillary.telemetry.summary import run_table, summary_of

    summaries = [summary_of(_history(each)) for each in _run_folders(folder)]
    summaries.sort(key=lambda summary: summary["last_time"] or 0.0, reverse=True)
    _print(summaries if as_json else run_table(summaries), as_json=as_json)
    return EXIT_FINISHED


def _show(folder: Path, *, as_json: bool) -> int:
    from armillary.telemetry.history import is_run_folder
    from armillary.telemetry.summary import details_of, run_page

    folder = named_run(folder)
    if not folder.is_dir():
        raise UserError(Problem(f"{folder}: no such folder", fix="armillary runs list"))
    if not is_run_folder(folder):
        raise UserError(
            Problem(
                f"{folder}: not a run folder, there is no events.jsonl in it",
                allowed="a folder that `armillary train --run` has written",
                fix="armillary runs list",
            )
        )
    history = _history(folder, strict=True)
    _print(details_of(history) if as_json else run_page(history), as_json=as_json)
    return EXIT_FINISHED


def _run_folders(folder: Path) -> list[Path]:
    """`folder` itself when it is a run, else the runs in it."""
    from armillary.telemetry.history import is_run_folder

    if not folder.exists() and folder == Path(RUNS_FOLDER):
        return []
    if not folder.is_dir():
        raise UserError(
            Problem(
                f"{folder}: no such folder",
                allowed="a folder that holds run folders",
                fix="armillary train, which makes runs/NAME, or armillary runs list FOLDER",
            )
        )
    if is_run_folder(folder):
        return [folder]
    found = sorted(each for each in folder.iterdir() if each.is_dir() and is_run_folder(each))
    if not found and folder != Path(RUNS_FOLDER):
        raise UserError(
            Problem(
                f"{folder}: there are no runs in it",
                allowed="a folder that holds run folders (with events.jsonl)",
                fix="armillary runs list FOLDER",
            )
        )
    return found


def _history(folder: Path, *, strict: bool = False) -> Any:
    """The run's history; when not strict, one that cannot be read is shown as such."""
    from armillary.telemetry.history import History, read_history

    try:
        return read_history(folder)
    except (ArmillaryError, OSError, ValueError) as error:
        if not strict:
            history = History(folder)
            history.unreadable = True
            return history
        if isinstance(error, ArmillaryError):
            raise
        raise UserError(
            Problem(
                f"{folder / 'events.jsonl'}: not the events of a run: {error}",
                allowed="a folder that `armillary train --run` has written",
                fix="armillary runs list",
            )
        ) from error


def _print(result: Any, *, as_json: bool) -> None:
    print(json.dumps(result, indent=1) if as_json else result)
