"""The training room: assemble a recipe, take optimizer steps, validate, close the run."""
