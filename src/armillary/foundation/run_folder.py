"""What the things in a run folder are called; docs/contracts.md promises these names."""

from __future__ import annotations

RECIPE_FILE = "recipe.toml"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
TOKENIZER_FOLDER = "tokenizer"
