"""Who moves and computes what, and when: tiles, the steps of a pass, what travels, what is needed."""
