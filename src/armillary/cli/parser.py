"""An argument parser that speaks as the rest of the system does, and leaves recipe values alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from armillary.foundation.errors import Problem, UserError, nearest

_HELP = ("-h", "--help")


class RecipeTokens(list[str]):
    """What was typed for the recipe, and which options the command itself has, for corrections."""

    own_options: tuple[str, ...] = ()


class Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse would print and leave; knows whether it takes a recipe.

    A command that takes a recipe calls `takes_recipe` in its `add_arguments`. What it does not know
    itself, words and options alike, then arrives as `arguments.recipe_tokens`.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        keywords.setdefault("allow_abbrev", False)
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **keywords)
        self.recipe_words: str | None = None
        self.choices: dict[str, Parser] = {}
        self._leaf = self

    def takes_recipe(self, words: str = "[RECIPE]") -> None:
        """Declares that recipe tokens follow; `words` says in the usage line how many recipes."""
        self.recipe_words = words
        self.usage = f"{self.prog} {words} [--LEAF VALUE ...] [--from-file FILE.toml] [options]"
        self.epilog = _RECIPE_HELP.format(prog=self.prog)

    @property
    def takes_recipes_alone(self) -> bool:
        """Whether the words name recipes; else a run, a folder or a source may stand there."""
        return self.recipe_words in ("[RECIPE]", "RECIPE RECIPE")

    def add_subparsers(self, **keywords: Any) -> Any:
        """As argparse's; remembers the sub-commands."""
        action: Any = super().add_subparsers(**keywords)
        self.choices = action.choices
        return action

    def error(self, message: str) -> NoReturn:
        """Called by argparse for the first thing that is wrong."""
        fix = None
        invalid = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if invalid:
            fix = nearest(invalid.group(1), re.findall(r"[\w.-]+", invalid.group(2)))
        elif unknown:
            fix = nearest(unknown.group(1).partition("=")[0], self._leaf.own_options())
        raise UserError(Problem(f"{self.prog}: {message}", fix=fix or f"{self.prog} --help"))

    def own_options(self) -> dict[str, argparse.Action]:
        """Option strings of this command itself."""
        return dict(self._option_string_actions)

    def positionals(self) -> list[argparse.Action]:
        """Words that this command takes, sub-commands aside."""
        words = [action for action in self._actions if not action.option_strings]
        return [action for action in words if action.dest != argparse.SUPPRESS and not self.choices]

    def parse(self, tokens: Sequence[str]) -> argparse.Namespace:
        """Parses the tokens after the command's name.

        Raises:
            UserError: they do not fit.
            HelpWanted: help was asked for.
        """
        rest, leaf, chosen = list(tokens), self, []
        while rest and rest[0] in leaf.choices:
            chosen.append(rest[0])
            leaf = leaf.choices[rest.pop(0)]
        own, recipe_tokens = leaf._split(rest) if leaf.recipe_words else (rest, [])
        if any(token in _HELP for token in own):
            raise HelpWanted(leaf, recipe_tokens)
        self._leaf = leaf
        arguments = self.parse_args([*chosen, *own])
        arguments.recipe_tokens = RecipeTokens(recipe_tokens)
        arguments.recipe_tokens.own_options = tuple(leaf.own_options())
        return arguments

    def _split(self, tokens: list[str]) -> tuple[list[str], list[str]]:
        """What belongs to this command, and what to the recipe."""
        own: list[str] = []
        others: list[str] = []
        options = self.own_options()
        while tokens:
            token = tokens.pop(0)
            name, equals, _ = token.partition("=")
            if name not in options:
                others.append(token)
                if name.startswith("--") and not equals and _is_value(tokens):
                    others.append(tokens.pop(0))  # `--a.b --run`: a value is never an option
                continue
            own.append(token)
            for _ in range(0 if equals else _values_taken(options[name], tokens)):
                own.append(tokens.pop(0))
        return own, others


def _is_value(tokens: list[str]) -> bool:
    return bool(tokens) and not tokens[0].startswith("--") and tokens[0] not in _HELP


def _values_taken(action: argparse.Action, tokens: list[str]) -> int:
    """How many of the tokens that follow are the option's."""
    available = 0
    while available < len(tokens) and _is_value(tokens[available:]):
        available += 1
    if action.nargs is None:
        return min(1, available)
    if isinstance(action.nargs, int):
        return min(action.nargs, available)
    return min(1, available) if action.nargs == "?" else available


class HelpWanted(Exception):
    """`--help` stands among the tokens of a command."""

    def __init__(self, parser: Parser, recipe_tokens: list[str]) -> None:
        self.parser, self.recipe_tokens = parser, recipe_tokens
        super().__init__(parser.prog)


_RECIPE_HELP = """\
RECIPE, the first word, is a registered name, path/to/file.py:name, module:name or a .toml file.
Any value of the recipe can be set: --optimizer.lr 1e-3, --optimizer muon, --compile.enabled,
--no-data.shuffle, --optimizer.betas 0.9,0.95, --budget.tokens none.
  {prog} RECIPE --help    lists every value: its type, what it is, what it means
  armillary recipes list    lists the recipes"""
