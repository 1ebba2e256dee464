"""The parts of `mpiattn check`: modules that gather facts on all ranks, and `judge_*`, which only judge facts."""
