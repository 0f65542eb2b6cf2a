"""Context parallelism: the ranks of `cp` share the tokens of each row, and attention joins them."""
