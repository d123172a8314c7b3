"""The templates of emitted scripts, as package data."""
