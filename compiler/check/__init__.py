"""Proof at compile time: what was captured, and what is emitted, compute what the model does."""
