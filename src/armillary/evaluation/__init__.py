"""What a model is asked, and what its answers are worth. See docs/evaluation.md.

Nothing here computes with a model, and nothing loads torch: a task makes `Request`s, and measures
the `Likelihood`s that come back. Who asks is `inference.evaluate`.
"""
