# SPDX-License-Identifier: Apache-2.0
"""The ranks of a hop: forks of a script that continues training, controlled by its argument, a job as JSON.

The job has at least the number of `ranks`. The last line printed is what rank 0 returns, as JSON.
"""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import rank_process
import torch
import torch.distributed as dist


def _rank(rank, train, job, meet):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    torch.set_num_threads(1)  # in each rank, see ranks.py of the DeepSpeed tests
    dist.init_process_group("gloo", init_method=f"file://{meet}/meet", rank=rank, world_size=job["ranks"])
    with contextlib.redirect_stdout(sys.stderr):
        answer = train(job)
    if rank == 0:
        print(json.dumps(answer), flush=True)
    dist.barrier()


def main(train):
    """Calls train(job) on every rank; ends the process."""
    job = json.loads(sys.argv[1])
    failed = False
    with tempfile.TemporaryDirectory() as meet:
        ranks = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                try:
                    _rank(rank, train, job, meet)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stdout.flush()
                os._exit(code)
            ranks.append(pid)
        while ranks:
            pid, status = rank_process.wait_for_any()  # helpers that a trainer leaves would hold our output open
            ranks.remove(pid)
            if status and not failed:
                failed = True
                for other in ranks:
                    os.kill(other, 9)
    sys.exit(failed)
