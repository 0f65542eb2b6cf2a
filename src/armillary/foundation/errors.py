"""Errors meant for people: where, what, allowed, next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from armillary.foundation.secrets import without_secrets

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RUN_ME_AGAIN = 75
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in words a user can act on."""

    message: str
    """Where and what: names the field, file or line and its value."""
    allowed: str | None = None
    """What would have been right."""
    fix: str | None = None
    """What to type or change next."""

    def render(self) -> str:
        """The problem as `error: ...` with `allowed:` and `try:` lines below it; no passwords."""
        lines = [f"error: {self.message}"]
        if self.allowed:
            lines.append(f"       allowed: {self.allowed}")
        if self.fix:
            lines.append(f"       try: {self.fix}")
        return without_secrets("\n".join(lines))


class ArmillaryError(Exception):
    """Base of the errors that are shown to a person without a traceback."""

    exit_code = EXIT_FAILED
    seen_by_every_rank = False
    """Whether all ranks of the run raise the same, so that one may speak for them."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        if not self.problems:
            raise AssertionError("an error needs at least one problem")
        super().__init__("\n".join(problem.render() for problem in self.problems))

    def __reduce__(self) -> tuple[type[ArmillaryError], tuple[list[Problem]]]:
        """Errors travel between ranks: rebuilt from the problems, not from the rendered text."""
        return type(self), (self.problems,)


class UserError(ArmillaryError):
    """The user's input is wrong, nothing was started (exit code 2). Holds all problems at once."""

    exit_code = EXIT_BAD_INPUT


class RunError(ArmillaryError):
    """Something failed after work had begun (exit code 1)."""

    exit_code = EXIT_FAILED


class Stopped(Exception):
    """Work was ended on request, in a state from which it can go on (exit code 75)."""

    exit_code = EXIT_RUN_ME_AGAIN

    def __init__(self, signal_name: str) -> None:
        self.signal_name = signal_name
        super().__init__(f"stopped on request ({signal_name}); the same command goes on from here")

    def __reduce__(self) -> tuple[type[Stopped], tuple[str]]:
        """See `ArmillaryError.__reduce__`."""
        return type(self), (self.signal_name,)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that looks most like `name`, or None when none is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def missing_extra(extra: str, what: str) -> UserError:
    """The error for an optional library that is not installed."""
    return UserError(
        Problem(
            f"{what} needs the optional dependency group {extra!r}",
            fix=f'pip install "armillary[{extra}]"',
        )
    )
