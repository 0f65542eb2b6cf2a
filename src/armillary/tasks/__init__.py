"""How a batch becomes a loss. See docs/tasks.md."""
