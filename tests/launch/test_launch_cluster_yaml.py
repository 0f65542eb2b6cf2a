"""YAML that every parser reads alike; PyYAML, which knows YAML 1.1, is the oracle."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some

from armillary.launch.yaml import Plain, to_documents, to_yaml

TRAPS = [
    "no",
    "On",
    "1e3",
    "2020-01-01",
    "~",
    "a: b",
    "- x",
    "#c",
    "",
    " a\nb",
    "a\n\n  b\nc",
    "a\n",
]
LEAVES = some.none() | some.booleans() | some.integers() | some.text() | some.sampled_from(TRAPS)
VALUES = some.recursive(
    LEAVES,
    lambda inner: some.lists(inner) | some.dictionaries(some.text(max_size=20), inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_what_is_written_is_read_back_equal(value: Plain) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("text", TRAPS)
def test_no_word_is_taken_for_anything_else(text: str) -> None:
    assert yaml.safe_load(to_yaml({text: text})) == {text: text}


def test_several_documents_stand_in_one_file() -> None:
    assert list(yaml.safe_load_all(to_documents([{"a": 1}, {"b": [2]}]))) == [{"a": 1}, {"b": [2]}]


def test_several_lines_are_shown_as_lines() -> None:
    assert to_yaml({"run": 'a "b"\nc'}) == 'run: |-\n  a "b"\n  c\n'
