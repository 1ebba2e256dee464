"""Some of the trials of faults.py, which makes up others at random."""

import faults
import launch
import pytest

TRIALS = (
    "decode/decode/kill/1/0",
    "program/append/exit/3/2",
    "run/end/stop/2/0",
    "backward/read again/raise/2/0",
    "program/decode/stop/0/1",
    "run/planning/leave/3/0",
    "run/steps/exit/1/3",
    "program/steps/raise/2/5",
    "mpi4py program/steps/raise/1/0",
    "many/note/kill/0/2",
    "many/steps/end/2/1",
    "many/flush/raise/3/3",
    "many/commit/exit/1/0",
)


@pytest.mark.draw(2)
@pytest.mark.parametrize("trial", TRIALS)
def test_what_is_promised(tmp_path, trial):
    launch.require_launch()
    outcome = faults.run(faults.Trial.parse(trial), tmp_path)
    assert outcome.seconds is not None and not outcome.wrong, outcome
