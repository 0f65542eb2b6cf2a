"""The recipe: one tree that says everything about a run. See docs/recipe.md. Loads no torch."""

from armillary.recipe.budget import Budget, Sampling, Validation
from armillary.recipe.diff import Difference, diff
from armillary.recipe.plain import recipe_sha256, to_plain
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import get, names, recipe
from armillary.recipe.toml import read_toml, to_toml

__all__ = [
    "Budget",
    "Difference",
    "Recipe",
    "Sampling",
    "Validation",
    "diff",
    "get",
    "names",
    "problems",
    "read_toml",
    "recipe",
    "recipe_sha256",
    "to_plain",
    "to_toml",
]
