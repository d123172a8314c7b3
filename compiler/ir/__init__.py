"""The forms: what passes take and return. No torch, no behaviour beyond printing."""
