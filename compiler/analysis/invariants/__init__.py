"""What each form promises, one function each."""
