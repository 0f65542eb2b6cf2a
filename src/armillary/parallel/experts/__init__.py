"""Experts of a mixture divided over ranks, and the exchange that takes tokens to them and back."""
