"""What a pass costs on a machine: its traffic, memory and time, and the search for the best plan."""
