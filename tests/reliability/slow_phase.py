"""What a process of a trial runs first (`Zygote.start(prelude=...)`): makes one phase long.

Reads the variable ARMILLARY_SLOW, JSON of {"place": "module:name", "call": N, "seconds": S,
"mark": path, "ranks": [...]}. From call N of that function on, each call on these ranks first
leaves a mark, a file, and then takes so much longer, asleep, as in a call of a library.
"""

import functools
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "ARMILLARY_SLOW"


def slow_down(place: str, call: int, seconds: float, mark: str, ranks: list[int]) -> None:
    """Patches the function."""
    rank = int(os.environ.get("RANK", "0"))
    if rank not in ranks:
        return
    module, _, path = place.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    original, calls = getattr(holder, name), 0

    @functools.wraps(original)
    def slow(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            Path(f"{mark}-{rank}").touch()
            time.sleep(seconds)
        return original(*args, **keywords)

    setattr(holder, name, slow)


if VARIABLE in os.environ:
    slow_down(**json.loads(os.environ[VARIABLE]))
