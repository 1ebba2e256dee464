"""The dense float64 oracle, and results compared with it."""
