"""Python calls counted: what some work costs, on a machine of any speed and load."""

import sys
from pathlib import Path


def calls(work, *modules):
    """How many functions of modules of mpiattn, named as their files, are called while work() runs."""
    count = 0

    def look(frame, event, argument):
        nonlocal count
        path = Path(frame.f_code.co_filename)
        count += event == "call" and path.parent.name == "mpiattn" and path.stem in modules

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
