"""Shared by commands, benchmarks and plots: options, launches, messages, tables, progress."""
