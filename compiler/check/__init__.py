"""Proof at compile time: what was captured, and what is emitted, compute what the user's model does."""
