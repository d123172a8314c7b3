"""The schema of the language, as package data."""
