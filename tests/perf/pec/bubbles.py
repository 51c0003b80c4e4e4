#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sends in the bubbles of a pipeline: steps of a 1F1B pipeline of four ranks next to an agent that saves into a tmpfs
store and copies to a second agent, in turns: snapshots alone, sends at once, sends while ranks idle (marked by the
ranks), and by a schedule (--pipeline).

    bubbles.py BIN PACKAGE FOLDER [--rounds 4] [--steps 18] [--every 6] [--params 16000000] [--beside 0] [--html FILE]

The pipeline is real: stages of a transformer, activations and gradients over gloo, torch's autograd and an optimizer.
So that four stages fit on few cores, a stage sleeps after each forward and backward pass (--forward, --backward): the
sleep stands for the work of a device, and the computation is the part that the sender disturbs. Checkpoints are made
before, as DeepSpeed writes those of a model with experts; every few steps rank 0 moves one into place.

A node of the pipeline is a core: the ranks given by --beside share the first one with the agent, report when they
idle, and must not be disturbed by it; the other ranks have the other cores. The second agent, which would be on
another node, runs there too, at the lowest priority.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests/interop/deepspeed"), str(ROOT / "tests/crash")]

import ranks  # pylint: disable=wrong-import-position
import torch
import torch.distributed as dist

STAGES = 4
CORES = os.sched_getaffinity(0)
WIDTH, TOKENS, SAMPLES = 128, 64, 4
MODES = ("snapshots alone", "at once", "while ranks idle", "by a schedule")
PATIENCE = 120


def make_checkpoints(given):
    """In a process of its own: what writes the files without torch takes the place of its classes."""
    pid = os.fork()
    if pid == 0:
        try:
            import moe_checkpoint

            class Model(moe_checkpoint.Model):
                """Numbers that are made faster."""

                def data(self, name, state, shape, iteration):
                    count = math.prod(shape)
                    every = int.from_bytes(b"\0\0\xff\x03" * count, "big")
                    base = int.from_bytes(b"\0\0\0\x38" * count, "big")
                    return (int.from_bytes(random.randbytes(4 * count)) & every | base).to_bytes(4 * count)

            model = Model(layers=2, experts=8, hidden=160, dtype="bf16", extra=[("head.weight", (given.params // 160, 160))])
            for number in range(given.steps // given.every + 1):
                moe_checkpoint.write(given.folder / "made", model, number * given.every + 1)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit("no checkpoints")
    return sum(path.stat().st_size for path in (given.folder / "made/global_step1").iterdir())


def cores_of(given, rank):
    """Cores of a rank, and of the agent that shares them; -1 is none of those."""
    cores = sorted(CORES)
    if len(given.beside) == STAGES or len(cores) == 1:
        return cores
    return cores[:1] if rank in given.beside else cores[1:]


class Agents:
    """Of rank 0: one that saves and sends, and one that keeps copies."""

    def __init__(self, given, mode, times):
        self.folder = given.folder / "work"
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "run").mkdir(parents=True)
        self.started = []
        self.address = f"unix:{self.folder / 'own'}"
        needed = ["--idle-ranks", str(given.idle_ranks)]
        words = {"snapshots alone": ["--bandwidth", "1"], "at once": [], "while ranks idle": needed,
                 "by a schedule": ["--pipeline", f"{STAGES},{given.micro_batches},{times[0]:.6f},{times[1]:.6f}",
                                   "--stages", ",".join(map(str, given.beside)), *needed]}[mode]
        self.start(given, "peer", -1, "--copies-only")
        self.start(given, "own", given.beside[0], "--k", 1, "--name", "own", "--peer", f"unix:{self.folder / 'peer'}", *words)

    def start(self, given, name, rank, *words):
        argv = ["taskset", "-c", ",".join(map(str, cores_of(given, rank))), "nice", "-n", 39 if rank < 0 else 0,
                given.bin / "pec-save", "agent", self.folder / "run", self.folder / "store", "--listen",
                f"unix:{self.folder / name}", "-q", *words]
        process = subprocess.Popen([str(word) for word in argv], stdin=subprocess.DEVNULL)
        self.started.append(process)
        while not (self.folder / name).exists():
            if process.poll() is not None:
                sys.exit(f"the agent has ended: {argv}")
            time.sleep(0.02)

    def checkpoint(self, given, step):
        tag = f"global_step{step}"
        os.rename(given.folder / "made" / tag, self.folder / "run" / tag)
        for path in (self.folder / "run" / tag).iterdir():
            os.utime(path)  # as if it was written now
        (self.folder / "run/new").write_text(tag)
        os.rename(self.folder / "run/new", self.folder / "run/latest")

    def put_back(self, given):
        for path in (self.folder / "run").glob("global_step*"):
            os.rename(path, given.folder / "made" / path.name)

    def ask(self, what):
        from shardwright._agent import Connection
        with Connection(self.address) as agent:
            agent.send(what)
            return json.loads(agent.text())

    def end(self):
        for process in self.started:  # delayed data would never be sent
            process.send_signal(signal.SIGKILL)
            process.wait()


class Recorder:
    """Idle intervals of this rank, for the benchmark's own count; and reported to the agent in the mode that uses
    them."""

    def __init__(self, marks):
        self.marks, self.idle = marks, []

    def __enter__(self):
        if self.marks is not None:
            self.marks.begin()
        self.idle.append([time.monotonic_ns(), 0])

    def __exit__(self, *_):
        self.idle[-1][1] = time.monotonic_ns()
        if self.marks is not None:
            self.marks.end()


class Stage:
    """One stage of the pipeline on this rank; step() is 1F1B."""

    def __init__(self, given):
        self.given, self.rank = given, dist.get_rank()
        torch.manual_seed(self.rank)
        self.block = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
                                           for _ in range(given.layers)))
        self.optimizer = torch.optim.AdamW(self.block.parameters(), lr=1e-4)
        self.forward_s, self.backward_s = [], []

    def step(self, idle):
        count, first, last = self.given.micro_batches, self.rank == 0, self.rank == STAGES - 1
        sent, made = [], []

        def forward():
            given = torch.randn(SAMPLES, TOKENS, WIDTH) if first else torch.empty(SAMPLES, TOKENS, WIDTH)
            if not first:
                with idle:
                    dist.recv(given, self.rank - 1)
                given.requires_grad_()
            start = time.monotonic()
            out = self.block(given)
            out = out.square().mean() if last else out
            time.sleep(self.given.forward)
            self.forward_s.append(time.monotonic() - start)
            made.append((given, out))
            if not last:
                sent.append((out, dist.isend(out.detach().contiguous(), self.rank + 1)))

        def backward():
            given, out = made.pop(0)
            gradient = None
            if not last:
                gradient = torch.empty_like(out)
                with idle:
                    dist.recv(gradient, self.rank + 1)
            start = time.monotonic()
            out.backward(gradient)
            time.sleep(self.given.backward)
            self.backward_s.append(time.monotonic() - start)
            if not first:
                sent.append((given.grad, dist.isend(given.grad, self.rank - 1)))

        ahead = min(count, STAGES - 1 - self.rank)
        for _ in range(ahead):
            forward()
        for _ in range(count - ahead):
            forward()
            backward()
        for _ in range(ahead):
            backward()
        for _, work in sent:
            work.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with idle:
            dist.barrier()


def idle_at_once(idle, needed):
    """Intervals in which so many ranks idle."""
    changes = sorted(itertools.chain.from_iterable(((begin, 1), (end, -1)) for rank in idle for begin, end in rank))
    found, here, begun = [], 0, 0
    for at, change in changes:
        if here < needed <= here + change:
            begun = at
        elif here >= needed > here + change:
            found.append((begun, at))
        here += change
    return found


def share_in(sends, stretches):
    inside = sum(size for at, size, _ in sends if any(begin <= at <= end for begin, end in stretches))
    return inside, sum(size for _, size, _ in sends)


def measure(given):
    """Collective. By mode: step times, and of rank 0 the times of sends."""
    sys.path.insert(0, str(given.package))
    import shardwright
    stage, rank = Stage(given), dist.get_rank()
    os.sched_setaffinity(0, cores_of(given, rank))
    for _ in range(3):
        stage.step(Recorder(None))
    times = [None] * STAGES
    dist.all_gather_object(times, (statistics.median(stage.forward_s), statistics.median(stage.backward_s)))
    times = [statistics.mean(column) for column in zip(*times)]
    busy = [None] * STAGES
    found = {mode: {"steps": [], "inside": 0, "sent": 0, "due": 0} for mode in MODES}
    for number in range(given.rounds):
        for mode in MODES[number % len(MODES):] + MODES[:number % len(MODES)]:
            agents = Agents(given, mode, times) if rank == 0 else None
            dist.barrier()
            marks = None
            if mode == "while ranks idle" and rank in given.beside:
                marks = shardwright.IdleTimes(f"unix:{given.folder / 'work/own'}", rank)
            idle, began, steps, cpu = Recorder(marks), 0, [], time.process_time()
            whole = time.monotonic()
            for step in range(given.steps):
                if step % given.every == 0 and agents is not None:
                    agents.checkpoint(given, step + 1)
                if step == given.every:
                    began = time.monotonic_ns()  # the first snapshot has everything, and no due time
                dist.barrier()
                start = time.monotonic()
                stage.step(idle)
                if step >= given.every:
                    steps.append(time.monotonic() - start)
            dist.all_gather_object(busy, (time.process_time() - cpu) / (time.monotonic() - whole))
            recorded = [None] * STAGES
            dist.all_gather_object(recorded, idle.idle)
            if marks is not None:
                marks.check()
            if agents is not None:
                told, status = agents.ask("sends"), agents.ask("status")
                sends = [one for one in told["sends"] if one[0] >= began and mode != "snapshots alone"]
                inside, sent = share_in(sends, idle_at_once([recorded[one] for one in given.beside],
                                                                given.idle_ranks or len(given.beside)))
                of = found[mode]
                of["steps"].append(steps)
                of["inside"] += inside
                of["sent"] += sent
                of["due"] += status["sends_due"]
                of["snapshots"] = status["snapshots"]
                of["persisted"] = status["persisted"]
                if given.page and mode == "while ranks idle":
                    subprocess.run([given.bin / "pec-save", "status", agents.address, "--html", given.page, "--force", "-q"],
                                   check=True, stdout=subprocess.DEVNULL)
                agents.end()
                agents.put_back(given)
            if marks is not None:
                marks.close()
            dist.barrier()
    return {"modes": found, "times": times, "busy": busy}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("package", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("folder", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--params", type=int, default=16_000_000, help="of the part that every snapshot takes")
    parser.add_argument("--forward", type=float, default=0.012, help="seconds that a stage sleeps in a forward pass")
    parser.add_argument("--backward", type=float, default=0.024)
    parser.add_argument("--beside", type=lambda text: [int(rank) for rank in text.split(",")], default=[0],
                        help="ranks beside the agent; all of them share all cores with it")
    parser.add_argument("--idle-ranks", type=int, default=0, help="of them that have to idle at once")
    parser.add_argument("--html", help="what the agent says of the last sends while ranks idle")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    try:
        size = make_checkpoints(given)
        found = ranks.run(STAGES, measure, given, seconds=1800)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    print(f"{STAGES} stages, {given.micro_batches} micro-batches, {found['times'][0] * 1e3:.1f} ms forward, "
          f"{found['times'][1] * 1e3:.1f} ms backward; processors busy with the ranks {sum(found['busy']):.2f} of {os.cpu_count()}; "
          f"a checkpoint of {size / 1e6:.0f} MB every {given.every} steps")
    base = found["modes"][MODES[0]]["steps"]
    for mode in MODES:
        of = found["modes"][mode]
        steps = [step for one in of["steps"] for step in one]
        more = [100 * (statistics.mean(one) / statistics.mean(alone) - 1) for one, alone in zip(of["steps"], base)]
        line = (f"{mode:17} {statistics.mean(steps):.4f} s a step (median {statistics.median(steps):.4f}, {min(steps):.3f}-"
                f"{max(steps):.3f}), in rounds " + " ".join(f"{one:+.1f}" for one in more) + f" %, median {statistics.median(more):+.1f} %")
        if of["sent"]:
            line += (f"; {of['sent'] / 1e6 / given.rounds:.0f} MB sent a round, {100 * of['inside'] / of['sent']:.1f} % while "
                     f"they idled, {of['due']} due; {of['snapshots']} snapshots, persisted {of['persisted']}")
        print(line)


if __name__ == "__main__":
    main()
