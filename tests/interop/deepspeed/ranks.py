"""Runs a function on several ranks of one machine: forks of this process, so that PyTorch and
DeepSpeed, and what they import when first used, are imported once. Nothing here may use autograd or process
groups itself: their threads would not survive the fork.
"""

import faulthandler
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", GLOO_SOCKET_IFNAME="lo",
                  MASTER_ADDR="localhost", MASTER_PORT="0")

import old_releases

old_releases.prepare()
import deepspeed
import deepspeed.comm.torch
import deepspeed.runtime.pipe.engine
try:
    import deepspeed.runtime.zero.muon.original_muon
except ImportError:
    pass  # an older release
import torch
import torch._dynamo
import torch._inductor.compile_fx

old_releases.complete()
torch.set_num_threads(1)
# A compiled short cut for reductions within a machine: seconds of compiling, nothing of a checkpoint.
deepspeed.comm.torch.build_shm_op = lambda: None


def _become(rank, ranks, folder, function, arguments):
    """The life of a rank; its answer is the JSON of what the function returns."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    try:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False,
                                   init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
        answer = function(*arguments)
        (folder / f"answer{rank}").write_text(json.dumps(answer))
        torch.distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the parent's handlers are not ours to run


def _failure(folder, rank, what):
    lines = (folder / f"log{rank}").read_text(errors="replace").splitlines()
    lines = [line for line in lines if "[INFO]" not in line and "[WARNING]" not in line and line.strip()]
    return RuntimeError("\n".join([f"rank {rank} {what}:", *lines[-40:]]))


def run(ranks, function, *arguments, seconds=300):
    """What function(*arguments) returns on rank 0; raises with the log of the first rank that fails."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = pathlib.Path(name)
        left = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _become(rank, ranks, folder, function, arguments)
            left[pid] = rank
        failed = None
        end = time.monotonic() + seconds
        while left and failed is None:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done and status:
                    failed = failed or _failure(folder, left[pid], f"ended with {os.waitstatus_to_exitcode(status)}")
                if done:
                    del left[pid]
            if left and failed is None and time.monotonic() > end:
                for pid in left:
                    os.kill(pid, signal.SIGUSR1)  # says where it is
                time.sleep(1)
                late = [_failure(folder, rank, f"is not done after {seconds} s") for rank in sorted(left.values())]
                failed = RuntimeError("\n".join(map(str, late)))
            time.sleep(0.02)
        for pid in left:  # they wait for the one that failed
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if failed:
            raise failed
        return json.loads((folder / "answer0").read_text())
