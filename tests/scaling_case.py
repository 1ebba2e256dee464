"""What the scripts share that measure one case of tests/scaling.py on the ranks of a launch."""

import argparse
import json

from mpiattn.console.launch import on_all_ranks


def run(description, measure):
    """Measures the case of the command line, and prints it with the results as JSON.  Returns the exit code.

    measure: takes the job and the case, and returns a dict of results.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, required=True, help="as tests/scaling.py writes it")
    parser.add_argument("--json", required=True, help="-")
    args = parser.parse_args()

    def work(job):
        results = measure(job, args.case)
        if job.comm.rank == 0:
            print(json.dumps({"case": args.case, **results}))
        return 0

    return on_all_ranks(work)
