"""Text from trained models."""
