"""Starting runs: on this machine, and, later, on clusters as specifications rendered as text."""
