"""Recipes by name, in files of the user's own, and components of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.cli.recipe_arguments import resolve
from armillary.foundation.errors import UserError
from armillary.recipe import get, recipe, recipe_sha256, to_toml
from snapshots import assert_matches_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"

OWN = '''
from dataclasses import dataclass
from armillary.foundation.component import component
from armillary.optim.schedule import ScheduleConfig
from armillary.recipe import Recipe, Budget, recipe


@component("halved")
@dataclass(frozen=True, kw_only=True, slots=True)
class Halved(ScheduleConfig):
    """Half the rate."""

    share: float = 0.5
    """Of the rate."""

    def problems(self, total_steps):
        return []

    def factor(self, total_steps):
        return lambda step: self.share


@recipe("mine")
def my_recipe() -> Recipe:
    """My own."""
    return Recipe(budget=Budget(steps=3), schedule=Halved(share=0.25))


def plain() -> Recipe:
    return Recipe(seed=7)


def wrong() -> int:
    return 3


def divides() -> Recipe:
    return 1 / 0


def wants(size: int) -> Recipe:
    return Recipe()


def misspells() -> Recipe:
    return Recipe(budget=Budget(stepz=3))


def mistypes() -> Recipe:
    print("mistypes")
    return Recipe(seed="seven", model="llama", max_gradient_norm=None, budget=Budget(steps=2.5))
'''

PRINTING = """\
    print("called")
    return Recipe(seed=7)"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_a_file_of_ones_own_gives_recipes_by_function_and_by_name(own: Path) -> None:
    assert get(f"{own}:my_recipe") == get(f"{own}:mine") == get(str(own))
    assert get(f"{own}:plain").seed == 7


def test_a_component_of_ones_own_is_chosen_by_its_file(own: Path) -> None:
    typed = ["debug", "--schedule", f"{own}:halved", "--schedule.share", "0.1"]
    made = resolve(typed).recipe
    assert made.schedule.build(10)(3) == 0.1
    assert resolve(["debug", "--schedule", f"{own}:Halved", "--schedule.share=0.1"]).recipe == made


def test_what_is_written_to_a_run_folder_finds_the_users_component_again(own: Path) -> None:
    made = get(f"{own}:mine")
    written = own.with_name("recipe.toml")
    written.write_text(to_toml(made))
    again = resolve(["--from-file", str(written)]).recipe
    assert again == made
    assert recipe_sha256(again) == recipe_sha256(made)
    assert get(str(written)) == made


def test_wrong_names_are_told_with_the_nearest(own: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_like_that")
    texts = []
    for name in (
        "strater",
        "llama3-8",
        f"{own}:mien",
        f"{own}:wrong",
        f"{own}:divides",
        f"{own}:wants",
        f"{own}:misspells",
        f"{own}:mistypes",
        f"{tmp_path}/no.py:x",
        f"{broken}:x",
        "no.such.module:x",
        f"{tmp_path}/no.toml",
    ):
        with pytest.raises(UserError) as caught:
            get(name)
        texts.append(f"{name}\n{caught.value}\n".replace(str(tmp_path), "FOLDER"))
    for typed in (f"{own}:hlved", f"{tmp_path}/no.py:x"):
        with pytest.raises(UserError) as caught:
            resolve(["debug", "--schedule", typed])
        texts.append(f"--schedule {typed}\n{caught.value}\n".replace(str(tmp_path), "FOLDER"))
    assert_matches_snapshot("\n".join(texts), SNAPSHOTS / "wrong_names.txt")


def test_a_name_is_held_by_one_function() -> None:
    with pytest.raises(ValueError, match="already holds the recipe name 'debug'"):
        recipe("debug")(lambda: get("starter"))


def test_a_file_is_the_whole_recipe_or_stands_over_one(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 5\n[budget]\ntokens = 1e6\n")
    alone = resolve(["--from-file", str(file)])
    assert (alone.recipe.seed, alone.recipe.budget.tokens, alone.name) == (5, 1e6, str(file))
    over = resolve(["debug", f"--from-file={file}", "--seed", "6"])
    assert (over.recipe.seed, over.recipe.budget.tokens, over.recipe.budget.steps) == (6, 1e6, None)
    assert over.recipe.model == get("debug").model
    assert resolve([], default="debug").recipe == get("debug")


def test_what_a_file_of_ones_own_prints_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speaks.py"
    file.write_text('print("read")\n' + OWN.replace("    return Recipe(seed=7)", PRINTING))
    assert get(f"{file}:plain").seed == 7
    assert capsys.readouterr() == ("", "read\ncalled\n")


def test_a_toml_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 5\n", encoding="utf-8-sig")
    assert get(str(file)).seed == 5


def test_a_glob_that_is_not_quoted_is_told_from_many_recipes(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.txt" for name in "abcdef"]
    for file in files:
        file.write_text("text")
    for count in (2, 6):
        with pytest.raises(UserError) as caught:
            resolve(["debug", "--data.corpus.files", *map(str, files[:count])])
        told = str(caught.value)
        assert "files where the name of a recipe would stand" in told
        assert "in quotes" in told
        assert ("and 2 more" in told) == (count == 6)


@pytest.mark.parametrize("typed", [["a", "b"], ["--from-file"], [], [""], ["", "--seed", "1"]])
def test_a_command_line_without_one_recipe_is_refused(typed: list[str]) -> None:
    with pytest.raises(UserError):
        resolve(typed)
