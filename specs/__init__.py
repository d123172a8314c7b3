"""Example specs; `ppc init` writes the first of them, as package data."""
