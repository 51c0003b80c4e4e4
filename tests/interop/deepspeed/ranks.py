# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks of one machine: forks of this process, so that PyTorch and
DeepSpeed, and the modules that they import when first used, are imported once. Nothing here may use autograd or process
groups itself: their threads would not survive the fork.
"""

import json
import os
import pathlib
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", GLOO_SOCKET_IFNAME="lo",
                  MASTER_ADDR="localhost", MASTER_PORT="0",
                  # Virtual machines may name matrix units that the processes are not let use: an illegal instruction.
                  ONEDNN_MAX_CPU_ISA="AVX512_CORE")

import old_releases
import rank_process

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
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # deepspeed.comm.torch itself is PyTorch


def has_ended(pid):
    """True if a child has ended; a later wait still returns its status."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(pid):
    """Kills a child that makes a session of its own, with all that it has started, also before it has made it."""
    while True:
        try:
            os.killpg(pid, signal.SIGKILL)
            return
        except ProcessLookupError:
            if has_ended(pid):
                return
            time.sleep(0.001)


def _become(rank, ranks, folder, function, arguments):
    """The life of a rank; its answer is the JSON of the function's result."""
    def live():
        rank_process.name_rank(rank, ranks)
        # PyTorch makes the pool of threads that a fork has cut off again at its first use: here, since its own threads
        # would race for it.
        torch.set_num_threads(1)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False,
                                   init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
        answer = function(*arguments)
        (folder / f"answer{rank}").write_text(json.dumps(answer))
        torch.distributed.barrier()

    rank_process.become(folder / f"log{rank}", live)


def _failure(folder, rank, what):
    lines = (folder / f"log{rank}").read_text(errors="replace").splitlines()
    lines = [line for line in lines if "[INFO]" not in line and "[WARNING]" not in line and line.strip()]
    return "\n".join([f"rank {rank} {what}:", *lines[-40:]])


def run(ranks, function, *arguments, seconds=3000):
    """The result of function(*arguments) on rank 0; raises with the logs of the ranks that fail first."""
    with tempfile.TemporaryDirectory(prefix="sw-ranks-") as name:
        folder = pathlib.Path(name)
        left = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _become(rank, ranks, folder, function, arguments)
            left[pid] = rank
        failures = []
        end = time.monotonic() + seconds
        while left and time.monotonic() < end:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done and status:
                    failures.append((left[pid], f"ended with {os.waitstatus_to_exitcode(status)}"))
                    # A rank that lost a peer mostly ends before the peer's end is seen here: all that end now are
                    # reported.
                    end = min(end, time.monotonic() + 2)
                if done:
                    del left[pid]
            time.sleep(0.02)
        if left and not failures:
            for pid in left:
                os.kill(pid, signal.SIGUSR1)  # prints its stack
            time.sleep(1)
            failures = [(rank, f"is not done after {seconds} s") for rank in sorted(left.values())]
        for pid in left:  # they wait for the one that failed
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if failures:
            raise RuntimeError("\n".join(_failure(folder, rank, what) for rank, what in failures))
        return json.loads((folder / "answer0").read_text())


def begin(ranks, function, *arguments, seconds=3000):
    """As run, in a child of its own session that nothing waits for here: its pid. It ends with 0 where run returns."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 1
        try:
            run(ranks, function, *arguments, seconds=seconds)
            code = 0
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
        os._exit(code)
    return pid


def ends_or_is_killed(pid, progress, kill_after, seconds=2400):
    """Waits for a child of begin, which is killed when progress() has grown by the first of kill_after, and the second, in
    seconds, has passed; None: it is not killed. Whether it has ended by itself; it must not have failed."""
    if kill_after is not None:
        before, (wanted, extra), end = progress(), kill_after, time.monotonic() + seconds
        while progress() < before + wanted and time.monotonic() < end and not has_ended(pid):
            time.sleep(0.01)
        if not has_ended(pid):
            time.sleep(extra)
        kill_group(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0 or (code == -signal.SIGKILL and kill_after is not None):
        return code == 0
    raise RuntimeError(f"the ranks' parent ended with {code}")
