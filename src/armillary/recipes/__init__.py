"""Curated recipes: one module per model family. See docs/recipe.md.

Every module here is read when a recipe is looked up by name.
"""
