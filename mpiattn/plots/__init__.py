"""Pictures, drawn with matplotlib (extra `plot`): one module a picture, loaded when one is drawn.

assignment: which rank computes which block, and what one rank receives for that.  timeline: what a rank does when,
predicted or measured.  traffic: bytes a rank against the number of ranks.  scaling: time and speed-up against it.
page: the first three together, of a plan.  Each has draw_... functions, which draw on axes that they are given, and one
of its own name, which gives a whole `matplotlib.figure.Figure`; `style.save` writes that.
"""
