"""Curated recipes: a module per model family, and `placing` with what they share. docs/recipes.md.

Every module here is read when a recipe is looked up by name.
"""
