"""Tests run on the CPU, also where there is a GPU, and leave no component of their own behind."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything loads torch

from collections.abc import Iterator

import pytest

from armillary.foundation import component


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`: tests marked `full`, which take minutes, run too."""
    parser.addoption("--full", action="store_true", help="run the tests marked full as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `full`, unless asked for."""
    if config.getoption("--full"):
        return
    left = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def _forget_components_of_a_test() -> Iterator[None]:
    """What a user's file registered would otherwise be among the choices that errors list."""
    before = {slot: set(choices) for slot, choices in component._REGISTRY.items()}
    yield
    for slot, choices in component._REGISTRY.items():
        for name in set(choices) - before.get(slot, set()):
            if not choices[name].__module__.startswith("armillary."):
                del choices[name]
