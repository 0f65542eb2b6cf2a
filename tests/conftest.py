"""Tests run on the CPU, also where there is a GPU, and leave no component of their own behind."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything loads torch

from collections.abc import Iterator

import pytest

from armillary.foundation import component


@pytest.fixture(autouse=True)
def _forget_components_of_a_test() -> Iterator[None]:
    """What a user's file registered would otherwise be among the choices that errors list."""
    before = {slot: set(choices) for slot, choices in component._REGISTRY.items()}
    yield
    for slot, choices in component._REGISTRY.items():
        for name in set(choices) - before.get(slot, set()):
            if not choices[name].__module__.startswith("armillary."):
                del choices[name]
