"""The checks of `mpiattn check` on these ranks find nothing wrong; the facts are the same on all."""

import json

import pytest

from mpiattn.check.survey import steps, survey
from mpiattn.console.launch import Job


@pytest.mark.whole
def test_nothing_fails_here(comm, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("check")) if comm.rank == 0 else None)
    done = []
    items, facts = survey(Job(comm), folder, 60, done.append)
    assert [item for item in items if item.status == "FAIL"] == []
    assert sum(done) == steps(comm.size)
    assert len(facts["ranks"]) == comm.size and len(facts["links"]) == (comm.size if comm.size > 1 else 0)
    assert len(set(comm.allgather(json.dumps([items, facts])))) == 1
