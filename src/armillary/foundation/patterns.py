"""Shell-style patterns over the names of a model's parts. Loads no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from armillary.foundation.errors import Problem


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a shell-style pattern (`layers.0.*`) matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def pattern_problems(
    leaf: str,
    patterns: Sequence[str],
    names: Sequence[str],
    default: Sequence[str] = (),
    *,
    what: str = "parameter",
) -> list[Problem]:
    """A problem for each pattern that matches no name, unless it is one of the default's.

    Args:
        leaf: the option that holds the patterns.
        patterns: as they are written.
        names: what they are over.
        default: patterns that need not match.
        what: what has these names.
    """
    problems = []
    for pattern in patterns:
        if pattern in default or any(fnmatchcase(name, pattern) for name in names):
            continue
        near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
        problems.append(
            Problem(
                f"{leaf}: the pattern {pattern!r} matches no {what} of the model",
                f"a shell-style pattern over {what} names, the nearest being {', '.join(near)}",
                f"--{leaf} '[\"{near[0]}\"]'" if near else None,
            )
        )
    return problems
