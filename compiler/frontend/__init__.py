"""What the user wrote, read: the spec and, in `capture`, the model."""
