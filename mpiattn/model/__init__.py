"""Predicted traffic, memory and time of a pass on a machine, and the search for the best plan."""
