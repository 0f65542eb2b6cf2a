"""Which weights of a model are trained, and what is put beside them. See docs/fine-tuning.md."""
