"""Tasks: format, generator, validation, splits, verifier."""
