"""Corpora -> documents -> tokens on disk -> packed samples -> batches. See docs/data.md."""
