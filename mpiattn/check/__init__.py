"""What `mpiattn check` looks at: modules that gather facts on all ranks, and `judge_*`, which judge facts alone."""
