"""Prints a script that completes commands, options and names of recipes in your shell.

bash:  armillary completion bash > ~/.local/share/bash-completion/completions/armillary
zsh:   armillary completion zsh > ~/.zfunc/_armillary      (with ~/.zfunc in fpath)
tcsh:  armillary completion tcsh > ~/.armillary.tcsh       (source it in ~/.tcshrc)
fish:  armillary completion fish > ~/.config/fish/completions/armillary.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED

SHELLS = ("bash", "zsh", "tcsh", "fish")


def add_arguments(parser: Parser) -> None:
    """Adds the shell's name."""
    parser.add_argument("shell", choices=SHELLS, help="shell to write for")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    from armillary.recipe.registry import names

    parser = _whole_parser(names())
    if arguments.shell == "fish":
        print("\n".join(["complete -c armillary -f", *_fish(parser, [])]))
        return EXIT_FINISHED
    import shtab

    print(shtab.complete(parser, shell=arguments.shell))
    return EXIT_FINISHED


def _whole_parser(recipes: list[str]) -> Parser:
    """All commands at once, with the word RECIPE as an argument of its own."""
    from armillary.cli.main import fill, overview

    parser = overview()
    for name, child in parser.choices.items():
        fill(name, child)
        _add_recipe_word(child, recipes)
    return parser


def _add_recipe_word(parser: Parser, recipes: list[str]) -> None:
    if parser.recipe_words is not None:
        parser.add_argument("recipe", nargs="?", choices=recipes, help="name of a recipe")
        parser.add_argument("--from-file", metavar="FILE.toml", help="values from a TOML file")
    for child in parser.choices.values():
        _add_recipe_word(child, recipes)


def _fish(parser: Parser, words: list[str]) -> Iterator[str]:
    """One `complete` line a word: each needs the words before it and none beside it."""
    seen = [f"__fish_seen_subcommand_from {word}" for word in words]
    for name, child in parser.choices.items():
        others = " ".join(parser.choices)
        conditions = [*seen, f"not __fish_seen_subcommand_from {others}"]
        yield _fish_line(conditions, f"-a {name}")
        yield from _fish(child, [*words, name])
    for action in parser.positionals():
        for choice in action.choices or ():
            yield _fish_line(seen, f"-a {choice}", action.help)
    for option, action in parser.own_options().items():
        if option.startswith("--"):
            argument = "" if action.nargs == 0 else " -r -F"
            yield _fish_line(seen, f"-l {option[2:]}{argument}", action.help)


def _fish_line(conditions: list[str], what: str, text: str | None = None) -> str:
    line = "complete -c armillary"
    if conditions:
        line += f" -n '{'; and '.join(conditions)}'"
    quoted = (text or "").replace("\\", "\\\\").replace("'", "\\'")
    return f"{line} {what}" + (f" -d '{quoted}'" if quoted else "")
