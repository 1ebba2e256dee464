"""What the commands, benchmarks and pictures share: options, launches, messages, tables, progress."""
