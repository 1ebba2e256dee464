"""Plots with matplotlib (extra `plot`): one module per plot, imported when it is drawn.

assignment: which rank computes which block, and what one rank receives for it.  timeline: the blocks, waiting and
transfers of ranks over time, predicted or measured.  traffic: bytes per rank against the number of ranks.  scaling:
time and speed-up against it.  page: the first three together, for a plan.  Each module has draw_... functions, which
draw on given axes, and a function of its own name, which returns a `matplotlib.figure.Figure`; `style.save` writes it.
"""
