"""What every room may lean on: components, errors, progress, files. Imports no torch."""
