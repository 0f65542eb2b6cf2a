"""What runs have shown: comparisons of recipes and runs, sweeps, scaling fits. Loads no torch."""
