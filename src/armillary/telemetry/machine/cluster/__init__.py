"""What `armillary doctor --cluster` looks at: all ranks of a run, and what lies between them."""
