"""Plots with matplotlib (extra `plot`): one module per plot, imported when it is drawn.

assignment: which rank computes which block, and what one rank receives for it.  mesh: ranks in rows and columns.
timeline: the blocks, waiting and transfers of ranks over time, predicted or measured.  listed: the tiles of a plan's
table.  page: these four together, for a plan.  traffic: bytes per rank against the number of ranks.  scaling: time and
speed-up against it.  Modules have draw_... functions, which draw on given axes, and most have a function of their own
name, which returns a `matplotlib.figure.Figure`; `style.save` writes it.
"""
