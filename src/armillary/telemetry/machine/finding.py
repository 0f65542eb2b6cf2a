"""One thing that `armillary doctor` looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found, whether it is good, and what to do."""

    name: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty when there is nothing to do."""
    values: dict[str, Any] = field(default_factory=dict)
    """The figures, with units in the key, for `--json`."""

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)


def finding(
    name: str, text: str, advice: str = "", /, *, verdict: Verdict | None = None, **values: object
) -> Finding:
    """A finding that is `ok`, or `warn` when it comes with advice, unless told otherwise."""
    chosen: Verdict = verdict or ("warn" if advice else "ok")
    return Finding(name=name, verdict=chosen, text=text, advice=advice, values=values)
