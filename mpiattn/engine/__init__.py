"""Execution of a schedule on a mesh with a back end."""
