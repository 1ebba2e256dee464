"""Measures the machine that ranks run on: what `mpiattn tune` stores and plans reckon with."""
