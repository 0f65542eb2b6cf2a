"""Where checkpoints lie: a local folder or an object store, behind one protocol."""
