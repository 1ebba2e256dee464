"""Measures the machine that ranks run on: the figures that `mpiattn tune` stores and plans use."""
