"""Data sets and the training loop."""
