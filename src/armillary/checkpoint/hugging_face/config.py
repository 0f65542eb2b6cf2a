"""The recipe's parts about weights that come in and go out. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from armillary.foundation.errors import Problem

EXPORT_DTYPES = ("", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Initial:
    """What a new run begins with, in the place of random weights."""

    weights: str = ""
    """Where from: hf:OWNER/NAME, a folder of Hugging Face format, or a run or checkpoint of ours;
    weights only, and the run begins at step 0. Empty: random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Copies of checkpoints in a format that other tools load, made while training goes on."""

    every: int = 0
    """Steps between two exports, a multiple of those between checkpoints; 0 = none."""
    format: str = "hf"
    """The one there is: Hugging Face safetensors, config and tokenizer."""
    dtype: str = "bfloat16"
    """Of the weights: bfloat16, float16, float32; empty = as the checkpoint has them."""
    keep_last: int = 2
    """Newest exports that stay; 0 = all of them."""
    folder: str = ""
    """Where they go, as step-00000020 and so on: empty = RUN/exports, else an absolute path, in
    which each run has a folder of its own name."""

    def problems(self, saves: tuple[int, ...] = ()) -> list[Problem]:
        """What is wrong with the values.

        Args:
            saves: steps between checkpoints, of each kind there is.
        """
        found = []
        for name in ("every", "keep_last"):
            if (value := getattr(self, name)) < 0:
                option = f"--export.{name.replace('_', '-')} 0"
                found.append(Problem(f"export.{name} = {value}", "0 or more", option))
        if self.format != "hf":
            found.append(Problem(f"export.format = {self.format!r}", "hf", "--export.format hf"))
        if self.dtype not in EXPORT_DTYPES:
            allowed = ", ".join(name or '""' for name in EXPORT_DTYPES)
            fix = "--export.dtype bfloat16"
            found.append(Problem(f"export.dtype = {self.dtype!r}", allowed, fix))
        if self.folder and not Path(self.folder).is_absolute():
            message = f"export.folder = {self.folder!r} is relative"
            fix = f"--export.folder {Path(self.folder).expanduser().absolute()}"
            found.append(Problem(message, "an absolute path", fix))
        if self.every > 0 and not any(every > 0 and self.every % every == 0 for every in saves):
            periods = ", ".join(str(every) for every in saves if every > 0)
            found.append(
                Problem(
                    f"export.every = {self.every} is no multiple of the steps between checkpoints",
                    f"multiples of {periods}"
                    if periods
                    else "checkpoints are made at the end only",
                    f"--checkpoint.every {self.every}",
                )
            )
        return found
