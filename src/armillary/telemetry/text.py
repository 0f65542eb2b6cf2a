"""Text that is safe to print anywhere."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """The text on one line: line ends, tabs and control characters as their escapes."""
    text = text.replace("\n", "\\n").replace("\t", "\\t")
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
