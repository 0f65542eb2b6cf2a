"""What looks like a secret, so that it is not written where others read."""

from __future__ import annotations

import re

_NAMES = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.I)
_USER_INFO = re.compile(r"(?<=://)[^/\s@'\"]*@")


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name would hold one, such as HF_TOKEN or AWS_SECRET_ACCESS_KEY."""
    return _NAMES.search(name) is not None


def holds_a_secret(text: str) -> bool:
    """Whether a URL in it carries a user or a password: `https://user:password@host/`."""
    return _USER_INFO.search(text) is not None


def without_secrets(text: str) -> str:
    """The text with user and password of each URL replaced by `***`."""
    return _USER_INFO.sub("***@", text)
