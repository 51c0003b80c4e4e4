# SPDX-License-Identifier: Apache-2.0
"""Resumes many checkpoints with the fixtures' trainer in one process per rank: starting it costs more
than a resume does. Run by torchrun.

    resume.py TRAINER JOBS   JOBS: JSON list of argument lists of TRAINER
Prints one line "JOB n: OK" or "JOB n: FAILED" for each, and ends with the number of failures.
"""

import contextlib
import io
import json
import os
import runpy
import sys


def main():
    trainer, jobs = sys.argv[1], json.load(open(sys.argv[2], encoding="utf-8"))
    failures = 0
    for number, words in enumerate(jobs):
        sys.argv = [trainer, *words]
        said, good = io.StringIO(), True
        try:
            with contextlib.redirect_stdout(said):
                runpy.run_path(trainer, run_name="__main__")
        except SystemExit as ended:
            good = not ended.code
        # Only rank 0 compares; the others come to the next job's first collective and wait.
        if os.environ["RANK"] == "0":
            tensors = [line for line in said.getvalue().splitlines() if line.startswith("tensors ")]
            good = good and "RESUME OK" in said.getvalue()
            print(f"JOB {number}: {'OK' if good else 'FAILED'} {tensors[0] if tensors else ''}",
                  flush=True)
            if not good:
                print(said.getvalue(), flush=True)
            failures += not good
    sys.exit(failures)


main()
