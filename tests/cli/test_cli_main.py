"""The top of the command line: help, exit codes, errors in words, completion."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from armillary.cli import main as cli
from armillary.cli.parser import Parser
from armillary.foundation.errors import Problem, RunError, UserError
from armillary.foundation.tell import WORDS_VARIABLE
from snapshots import assert_matches_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"


def in_process(code: str) -> str:
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return made.stdout


@pytest.mark.parametrize("typed", ["--help", "--version", "trian", "train --help", "recipes list"])
def test_torch_is_not_loaded_to_answer(typed: str) -> None:
    code = (
        "import sys; from armillary.cli.main import main; "
        f"main({typed.split()!r}); print('torch' in sys.modules, file=sys.stderr)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.stderr.splitlines()[-1] == "False"


def test_only_the_module_of_the_command_is_loaded() -> None:
    code = (
        "import sys; from armillary.cli.main import main; main(['recipes', '--help']); "
        "print([name for name in sys.modules if name.endswith('_command')])"
    )
    assert in_process(code).splitlines()[-1] == "['armillary.cli.recipes_command']"


def test_the_package_runs_as_a_module() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "armillary", "--version"], capture_output=True, text=True
    )
    assert (made.returncode, made.stdout.split()[0]) == (0, "armillary")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_keeps_the_convention(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(cli.COMMANDS[name].module)
    assert module.__doc__
    assert callable(module.run)
    assert cli.main([name, "--help"]) == 0
    assert f"usage: armillary {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed",
    [
        "eval asked --help",
        "generate asked --temperature 1 --help",
        "import out1 --model.vocab-size 512 --help",
        "replay asked --help",
        "compare out asked --help",
        "train no-such-recipe --help",
        "train debug --optimizer.lr fast --help",
    ],
)
def test_help_is_shown_whatever_else_was_typed(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == 0
    said = capsys.readouterr()
    assert f"usage: armillary {typed.split(maxsplit=1)[0]}" in said.out
    assert ("error: " in said.err) == typed.startswith("train")


def test_help_lists_commands_and_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert_matches_snapshot(capsys.readouterr().out, SNAPSHOTS / "help.txt")


BAD = [
    "trian",
    "recipe list",
    "recipes",
    "recipes lst",
    "recipes show strater",
    "recipes show starter debug",
    "recipes show starter --optimzer.lr 3 --budget.stepz=4 --lr 1 --seed x --jsn",
    "recipes diff starter",
    "recipes list --jsn",
    "completion",
    "completion bosh",
    "train --run",
    "train starter --nproc four",
    "recipes show --from-file nowhere.toml",
    "recipes show debug --optimizer muno --schedule.kind cosine",
]


@pytest.mark.parametrize("typed", BAD)
def test_wrong_input_is_told_once_on_standard_error_with_exit_code_2(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    name = "".join(letter if letter.isalnum() else "_" for letter in typed)
    assert_matches_snapshot(f"$ armillary {typed}\n{err}", SNAPSHOTS / "bad" / f"{name}.txt")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--resume", ""], "--resume is empty"),
        (["--meet", "x:1"], "--meet x:1 without --nodes"),
        (["--nproc", "2", "--meet", "x:1"], "--meet x:1 without --nodes"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "debug", *typed]) == 2
    assert said in capsys.readouterr().err


def test_empty_words_are_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (["train", ""], ["recipes", "show", ""], ["train", "debug", "--run", ""]):
        assert cli.main(typed) == 2
        assert "is empty" in capsys.readouterr().err


def test_help_with_a_command_is_the_help_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["help", "train"]) == 0
    assert "usage: armillary train" in capsys.readouterr().out


def test_nothing_typed_shows_help_and_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "start here" in capsys.readouterr().out


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(arguments: object) -> int:
        raise error

    module = types.ModuleType("fails", "Fails.")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fails", module)
    monkeypatch.setitem(cli.COMMANDS, "fails", cli.Command("fails", "fails"))
    return cli.main(["fails"])


def test_errors_have_exit_codes_and_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(UserError([Problem("a", "b", "c"), Problem("d")]), monkeypatch) == 2
    assert capsys.readouterr().err == "error: a\n       allowed: b\n       try: c\nerror: d\n"
    assert raising(RunError(Problem("broke")), monkeypatch) == 1
    assert capsys.readouterr().err == "error: broke\n"
    assert raising(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_unexpected_is_one_line_unless_the_traceback_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(cli.TRACEBACK_VARIABLE, raising=False)
    assert raising(ZeroDivisionError("two\nlines"), monkeypatch) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: unexpected ZeroDivisionError: two lines (")
    assert second.strip() == "try: again with ARMILLARY_TRACEBACK=1 to see where it happened"
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert raising(ZeroDivisionError("x"), monkeypatch) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_what_every_rank_sees_one_tells_and_what_one_sees_it_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "debug", "--optimizer.lr", "-1"]) == 2
    assert capsys.readouterr().err == ""
    for error, code in ((UserError(Problem("mine")), 2), (RunError(Problem("mine")), 1)):
        assert raising(error, monkeypatch) == code
        assert capsys.readouterr().err == "error: mine\n"
    monkeypatch.setenv(WORDS_VARIABLE, str(tmp_path / "words"))
    assert cli.main(["train", "debug", "--optimizer.lr", "-1"]) == 2
    assert raising(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""
    words = (tmp_path / "words").read_text()
    assert words.startswith("error: optimizer.lr = -1.0")
    assert words.endswith("\ninterrupted\n")
    monkeypatch.setenv(WORDS_VARIABLE, str(tmp_path / "gone" / "words"))
    assert raising(RunError(Problem("no launcher")), monkeypatch) == 1
    assert capsys.readouterr().err == "error: no launcher\n"


def test_the_command_line_that_main_was_given_is_what_ranks_are_started_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "armillary.launch.local.launch",
        lambda argv, nproc, **place: started.append((argv, nproc)) or 75,
    )
    typed = ["train", "debug", "--nproc", "2", "--run", "here", "--parallel.device", "cpu"]
    assert cli.main(typed) == 75
    assert started == [(typed, 2)]


@pytest.mark.parametrize(
    ("typed", "own", "recipe"),
    [
        ("debug --a.b 1 --run x", "--run x", "debug --a.b 1"),
        ("--run=x debug --flag", "--run=x", "debug --flag"),
        ("--a.b --run x", "--run x", "--a.b"),
        ("--a.b -1 --many 1 2 --a.c 3", "--many 1 2", "--a.b -1 --a.c 3"),
        ("--json debug --no-a.b", "--json", "debug --no-a.b"),
        ("--a.b run --pair 1 2 3", "--pair 1 2", "--a.b run 3"),
    ],
)
def test_a_commands_own_options_are_told_from_the_recipes(
    typed: str, own: str, recipe: str
) -> None:
    parser = Parser(prog="x")
    parser.takes_recipe()
    parser.add_argument("--run")
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--pair", nargs=2)
    parser.add_argument("--json", action="store_true")
    assert parser._split(typed.split()) == (own.split(), recipe.split())
    assert parser.parse(typed.split()).recipe_tokens == recipe.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_a_completion_script_knows_commands_options_and_recipes(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("doctor", "recipes", "show", "llama3-405b", "starter-long", "nproc"):
        assert word in script, word


def test_the_bash_completion_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "armillary.bash").write_text(capsys.readouterr().out)
    code = (
        "source armillary.bash; COMP_WORDS=(armillary train sta); COMP_CWORD=2; "
        "COMP_LINE='armillary train sta'; COMP_POINT=${#COMP_LINE}; "
        "$(complete -p armillary | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${COMPREPLY[*]}"
    )
    made = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "BASH_ENV": ""},
    )  # fmt: skip
    assert sorted(made.stdout.split()) == ["starter", "starter-long"], made.stderr


def test_the_reader_of_the_output_may_leave() -> None:
    code = f"{sys.executable} -m armillary recipes list | head -1"
    made = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert made.stderr == ""
    assert made.stdout == "first run\n"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    for typed in ("list", "show debug", "diff debug starter"):
        assert cli.main(["recipes", *typed.split(), "--json"]) == 0
        out, err = capsys.readouterr()
        json.loads(out)
        assert err == ""


def test_an_interrupt_while_the_command_line_is_loaded_is_told_in_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from armillary.__main__ import main

    class Loading(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "armillary.cli.main", Loading("armillary.cli.main"))
    assert main() == 130
    assert capsys.readouterr() == ("", "interrupted\n")
