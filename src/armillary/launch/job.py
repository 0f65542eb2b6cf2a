"""What a run asks of a cluster, whoever runs it there. Loads no torch.

Each launcher is a dataclass below `Job` that writes the run as text for one batch system. On every
machine the text starts `armillary train --nproc ... --node-rank ...`, which starts the ranks there:
unlike torchrun it keeps exit codes, so that the batch system can tell a run that saved its state
and asks to be run again (75) from one that failed.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from armillary.foundation.errors import Problem
from armillary.foundation.run_folder import RUNS_FOLDER
from armillary.foundation.secrets import holds_a_secret, names_a_secret

_SET = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=[\"']?[^\s$\"']")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?\Z")
_LEAST_PORT, _LAST_PORT = 1_024, 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(ABC):
    """A run on a number of like machines."""

    kind: ClassVar[str]
    """What it is called on the command line."""
    suffix: ClassVar[str]
    """Of the file that it is written to."""

    recipe: tuple[str, ...] = ()
    """Words of the recipe, as they follow `armillary train`."""
    name: str = ""
    """of the job and its file (default: made of the recipe's name)"""
    nodes: int = 1
    """machines"""
    gpus_per_node: int = 8
    """GPUs of each machine; 0 for CPUs"""
    ranks_per_node: int = 0
    """ranks on each machine (default: one for each GPU, or one)"""
    run: str = ""
    """run folder, on storage that all machines share (default: runs/NAME)"""
    setup: str = ""
    """a line of shell that each machine runs first, such as 'source venv/bin/activate'"""
    env: tuple[str, ...] = ()
    """NAME=VALUE for every rank, may be repeated; not for secrets"""
    max_restarts: int = 3
    """failures after which the job is given up; a stop with saved state does not count"""
    port: int = 29_500
    """of machine 0, where the ranks meet"""

    @abstractmethod
    def render(self) -> str:
        """The text of the file; for a job without problems."""

    @abstractmethod
    def submission(self, file: str) -> list[str]:
        """The command that hands the file over; empty where it is for people to run."""

    def next_step(self, file: str) -> str:
        """What to type once the file is there."""
        return shlex.join(self.submission(file))

    @property
    def ranks(self) -> int:
        """Ranks on each machine."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.nodes * self.ranks

    @property
    def folder(self) -> str:
        """The run folder."""
        return self.run or f"{RUNS_FOLDER}/{self.name}"

    @property
    def variables(self) -> dict[str, str]:
        """`env`, taken apart."""
        return {name: value for name, _, value in (each.partition("=") for each in self.env)}

    def command(self) -> list[str]:
        """What each machine runs, but for the options that differ between machines."""
        words = ["armillary", "train", *self.recipe, "--run", self.folder]
        return [*words, "--nproc", str(self.ranks), "--nodes", str(self.nodes)]

    def problems(self) -> list[Problem]:
        """What is wrong, all at once; the recipe itself is another's business."""
        return [*self._numbers(), *self._texts(), *self._environment()]

    def _numbers(self) -> Iterator[Problem]:
        least = {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 0, "max_restarts": 0}
        for field, fewest in least.items():
            if (value := getattr(self, field)) < fewest:
                yield Problem(
                    f"{option(field)} {value}", f"{fewest} or more", f"{option(field)} {fewest}"
                )
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            yield Problem(
                f"--ranks-per-node {self.ranks_per_node} with --gpus-per-node {self.gpus_per_node}",
                allowed="one rank per GPU at most",
                fix=f"--ranks-per-node {self.gpus_per_node}",
            )
        if not _LEAST_PORT <= self.port <= _LAST_PORT:
            yield Problem(f"--port {self.port}", f"{_LEAST_PORT} to {_LAST_PORT}", "--port 29500")

    def _texts(self) -> Iterator[Problem]:
        if not _NAME.match(self.name):
            yield Problem(
                f"--name {self.name!r}",
                allowed="1 to 40 of a-z, 0-9 and -, a letter first",
                fix=f"--name {name_of(self.name)}",
            )
        for field in ("run", "setup"):
            yield from shown(field, getattr(self, field))
        for word in self.recipe:
            if holds_a_secret(word):
                yield Problem(
                    "a value of the recipe holds a URL with a user or a password",
                    allowed="URLs without; credentials come from the machines' environment",
                )

    def _environment(self) -> Iterator[Problem]:
        for each in self.env:
            name, equals, value = each.partition("=")
            if not equals or not _VARIABLE.match(name):
                yield Problem(f"--env {each!r}", allowed="NAME=VALUE", fix="--env NCCL_DEBUG=WARN")
            elif names_a_secret(name) or holds_a_secret(value):
                yield Problem(
                    f"--env {name}=... looks like a secret, and the file would show it",
                    allowed="what anyone may read",
                    fix=f"set {name} where the job is submitted, or by the cluster's own secrets",
                )
            yield from one_line("env", value)


def option(field: str) -> str:
    """How a field is typed."""
    return "--" + field.replace("_", "-")


def one_line(field: str, text: str) -> Iterator[Problem]:
    """A problem where a value would go on after the end of its line."""
    if any(character < " " or character in "\x7f\x85\u2028\u2029" for character in text):
        yield Problem(f"{option(field)} {text!r} holds control characters", "text of one line")


def shown(field: str, text: str) -> Iterator[Problem]:
    """A problem where a value is more than one line, or nothing for others to read."""
    yield from one_line(field, text)
    names = [name for name in _SET.findall(text) if names_a_secret(name)]
    if names or holds_a_secret(text):
        yield Problem(
            f"{option(field)} looks as if it held a secret, and the file would show it",
            allowed="what anyone may read",
            fix="set it where the job is submitted, or by the cluster's own secrets",
        )


def a_word(field: str, text: str) -> Iterator[Problem]:
    """A problem where a value stands bare in a line that splits at blanks."""
    if not re.match(r"[\w.,:@%+=/\[\]*&|()-]*\Z", text, re.ASCII):
        yield Problem(
            f"{option(field)} {text!r}", "letters, digits and . , : @ % + = / [ ] * & | ( ) _ -"
        )


def name_of(text: str) -> str:
    """A name for a job, made of a recipe's."""
    stem = Path(text.rpartition(":")[2] or text).stem.lower()
    letters = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].strip("-")
    return letters if _NAME.match(letters) else f"run-{letters}".strip("-")[:40].strip("-")


def prepared(setup: str, *start: str) -> list[str]:
    """Lines of shell that start something once the setup has succeeded.

    The setup has a line of its own: it may end in a comment, or hold `;` and `||`.
    """
    return [setup, 'test "$?" = 0 || exit 1', *start] if setup else [*start]


def exports(variables: dict[str, str]) -> list[str]:
    """Lines of shell that set variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
