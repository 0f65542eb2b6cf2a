"""Overrides, TOML and diff on a toy tree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_toys import Bulk, Color, Diesel, Lamp, Mixed, Steam, Train, Trip, Wagon

from armillary.foundation.errors import UserError
from armillary.recipe.diff import diff
from armillary.recipe.fields import fields_of
from armillary.recipe.overrides import apply, split_options
from armillary.recipe.plain import leaf_value, recipe_sha256, to_plain
from armillary.recipe.toml import read_toml, to_toml
from armillary.recipe.tree import Leaf, leaves
from snapshots import assert_matches_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"


DEFAULT = Train()


def override(text: str | list[str], base: Train = DEFAULT) -> Train:
    words, options = split_options(text.split() if isinstance(text, str) else text)
    assert not words
    return apply(base, options=options)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--seed 1e6", Train(seed=1_000_000)),
        ("--seed=1_000", Train(seed=1_000)),
        ("--seed -3", Train(seed=-3)),
        ("--engine.power 1e-3", Train(engine=Steam(power=1e-3))),
        ("--engine diesel --engine.label x", Train(engine=Diesel(label="x"))),
        ("--engine.coal 9 --engine steam", Train(engine=Steam(coal=9))),
        ("--whistle-on false", Train(whistle_on=False)),
        ("--whistle_on --no-whistle-on", Train(whistle_on=False)),
        ("--no-smoke", Train(no_smoke=True)),
        ("--no-no-smoke", Train()),
        ("--gauges 0.1,0.2", Train(gauges=(0.1, 0.2))),
        ("--gauges.1 7", Train(gauges=(0.9, 7.0))),
        ("--stops a,b", Train(stops=("a", "b"))),
        ("--stops.0 a,b --stops.1=c", Train(stops=("a,b", "c"))),
        (["--stops", '["a, b", "c"]'], Train(stops=("a, b", "c"))),
        (["--stops", ""], Train()),
        (["--stops", "def "], Train(stops=("def ",))),
        (["--stops", "a , b"], Train(stops=("a", "b"))),
        ("--window 3,5", Train(window=(3, 5))),
        ("--color blue --size 3", Train(color=Color.BLUE, size=3)),
        ("--speed 12", Train(speed=12)),
        ("--lamp.lumen 4", Train(lamp=Lamp(lumen=4))),
        ("--spare diesel --spare.power 2", Train(spare=Diesel(power=2.0))),
        ("--trip.hours 3", Train(trip=Trip(hours=3, kilometres=None))),
        ("--trip.hours 3 --trip.kilometres 2", Train(trip=Trip(hours=3, kilometres=2.0))),
        ("--wagons.0.weight 2 --wagons.1.load mixed",
         Train(wagons=(Wagon(weight=2.0), Wagon(load=Mixed())))),
        ("--load mixed --load.parts.0.load.tons 8",
         Train(load=Mixed(parts=(Wagon(load=Bulk(tons=8.0)),)))),
    ],
)  # fmt: skip
def test_what_is_typed_sets_the_leaf(typed: str | list[str], expected: Train) -> None:
    assert override(typed) == expected


def test_bytes_of_a_command_line_that_are_no_text_are_refused() -> None:
    with pytest.raises(UserError, match=r"stops = (?s:.*)allowed: .*UTF-8"):
        override(["--stops", "a\udcff"])


def test_none_unsets_what_is_optional() -> None:
    base = Train(lamp=Lamp(), spare=Steam(), window=(1, 2), trip=Trip(hours=3))
    made = override("--lamp none --spare none --window none --trip.hours None", base)
    assert made == Train(trip=Trip(kilometres=base.trip.kilometres))


def test_fields_of_the_same_name_do_not_carry_over_to_another_component() -> None:
    base = Train(engine=Steam(power=77.0))
    assert override("--engine diesel", base).engine == Diesel()
    assert override("--engine steam", base).engine == Steam(power=77.0)


def test_every_problem_is_told_at_once() -> None:
    typed = (
        "--seed 1.5 --enigne diesel --engine.pwoer 3 --coal 4 --engine.power fast --engine desel "
        "--color green --size huge --gauges 1,2,3 --gauges.2 1 --stops.4 x --whistle-on maybe "
        "--whistle-on=1 --seed.x 3 --spare.power 2 --window 1 --lamp bright --wagons x "
        "--trip.hours --no-seed --no-whistle-on=true --wagons.0.weight heavy --spare.label"
    )
    with pytest.raises(UserError) as caught:
        override(typed)
    assert_matches_snapshot(str(caught.value), SNAPSHOTS / "every_problem_typed.txt")


def test_a_field_set_before_its_component_is_swapped_away_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        override("--engine.power 3 --engine diesel")
    assert_matches_snapshot(str(caught.value), SNAPSHOTS / "set_before_swap.txt")


def test_every_problem_of_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        'seed = "7"\nwhistle_on = 1\nsize = true\nstops = "a"\nseeed = 3\n'
        '[engine]\nkind = "steem"\n[load]\ntons = "3"\n[spare]\npower = 3\n'
        "[[wagons]]\nweight = 3\nlod = 1\n[lamp]\nlumen = 1.5\n"
    )
    with pytest.raises(UserError) as caught:
        apply(Train(), [read_toml(file)])
    text = str(caught.value).replace(str(tmp_path), "FOLDER")
    assert_matches_snapshot(text, SNAPSHOTS / "every_problem_in_a_file.txt")


@pytest.mark.parametrize("content", [b"seed = ", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.toml"):
        read_toml(file)


def test_layers_apply_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text('seed = 1\n[engine]\nkind = "diesel"\npower = 3.0\n[trip]\nhours = 2\n')
    second.write_text("seed = 2\nno-smoke = true\n")
    _, options = split_options(["--engine.label", "x"])
    made = apply(Train(seed=9), [read_toml(first), read_toml(second)], options)
    engine = Diesel(power=3.0, label="x")
    trip = Trip(hours=2, kilometres=None)
    assert made == Train(seed=2, engine=engine, no_smoke=True, trip=trip)


NUMBERS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["none", "None", "\\none", "\\\\NONE", "a,b", "[", '"', "true", "\x7f\n\t"]
)
BULK = st.builds(Bulk, tons=NUMBERS)
WAGONS = st.builds(
    Wagon,
    weight=NUMBERS,
    load=BULK
    | st.builds(Mixed, parts=st.lists(st.builds(Wagon, load=BULK), max_size=2).map(tuple)),
)
ENGINES = st.builds(Steam, power=NUMBERS, coal=st.integers()) | st.builds(
    Diesel, power=NUMBERS | st.integers(-9, 9), label=st.none() | TEXT
)
TRAINS = st.builds(
    Train,
    seed=st.integers(),
    engine=ENGINES,
    spare=st.none() | ENGINES,
    load=BULK,
    wagons=st.lists(WAGONS, max_size=2).map(tuple),
    lamp=st.none() | st.builds(Lamp, lumen=st.integers()),
    trip=st.builds(Trip, hours=st.none() | st.integers(), kilometres=st.none() | NUMBERS),
    gauges=st.tuples(NUMBERS, NUMBERS),
    stops=st.lists(TEXT, max_size=3).map(tuple),
    window=st.none() | st.tuples(st.integers(), st.integers()),
    color=st.sampled_from(Color),
    size=st.sampled_from(["small", "large", 3]),
    whistle_on=st.booleans(),
    no_smoke=st.booleans(),
    speed=st.integers() | st.just("auto"),
)


@settings(max_examples=60, deadline=None)
@given(tree=TRAINS, base=TRAINS)
def test_toml_round_trip_is_identity_over_any_base(
    tmp_path_factory: pytest.TempPathFactory, tree: Train, base: Train
) -> None:
    file = tmp_path_factory.getbasetemp() / "round.toml"
    file.write_text(to_toml(tree), encoding="utf-8", newline="\n")
    again = apply(base, [read_toml(file)])
    assert again == tree
    assert to_toml(again) == to_toml(tree)
    assert recipe_sha256(again) == recipe_sha256(tree)
    assert diff(again, tree) == []
    json.loads(json.dumps(to_plain(tree), allow_nan=False))


@settings(max_examples=60, deadline=None)
@given(base=TRAINS, tree=TRAINS)
def test_typing_every_leaf_of_a_tree_over_any_base_gives_the_tree(base: Train, tree: Train) -> None:
    tree = replace(tree, wagons=base.wagons)  # lists of groups do not shrink from the command line
    typed = [f"--{leaf.name}={_typed(leaf)}" for leaf in leaves(tree)]
    assert override(typed, base) == tree
    assert (diff(base, tree) == []) == (recipe_sha256(base) == recipe_sha256(tree))


def _typed(leaf: Leaf) -> str:
    value = leaf_value(leaf.value, leaf.annotation)
    if isinstance(value, list):
        return "[" + ",".join(map(_typed_in_list, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed_in_list(value: object) -> str:
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str)
        else str(value)
    )


def test_a_document_is_complete_and_explained() -> None:
    tree = Train(wagons=(Wagon(), Wagon(load=Mixed(parts=(Wagon(),)))), lamp=Lamp())
    assert_matches_snapshot(to_toml(tree), SNAPSHOTS / "document.toml")


def test_docs_are_the_first_paragraph_on_one_line() -> None:
    assert {name: info.doc for name, info in fields_of(Steam).items()} == {
        "power": "Horsepower.",
        "coal": "Tons a day.",
    }
    assert all(leaf.doc for leaf in leaves(Train(wagons=(Wagon(),), lamp=Lamp())))


def test_the_fingerprint_knows_values_not_how_they_were_written() -> None:
    assert recipe_sha256(Train(engine=Diesel(power=9))) == recipe_sha256(Train(engine=Diesel()))
    assert recipe_sha256(Train(engine=Diesel())) != recipe_sha256(Train(engine=Steam(power=9.0)))
    assert recipe_sha256(Train(stops=("a", "b"))) != recipe_sha256(Train(stops=("a,b",)))


def test_diff_names_the_leaves_of_both_sides() -> None:
    found = diff(Train(), Train(engine=Diesel(), seed=1))
    assert [(d.name, d.first, d.second, d.in_first, d.in_second) for d in found] == [
        ("seed", 0, 1, True, True),
        ("engine", "recipe_toys:steam", "recipe_toys:diesel", True, True),
        ("engine.power", 1.5, 9.0, True, True),
        ("engine.coal", 3, None, True, False),
        ("engine.label", None, "none", False, True),
    ]
