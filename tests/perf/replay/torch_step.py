# SPDX-License-Identifier: Apache-2.0
"""Times one AdamW step of torch, as replay_bench does: torch_step.py ELEMS THREADS REPEATS [FILE]

With FILE it also writes the table that replay_bench takes.
"""

import sys
import time

import numpy
import torch


def main():
    elems, threads, repeats = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(threads)
    if len(sys.argv) > 4:
        bits = numpy.arange(0x3F800000, 0x3F800000 + 2**24, dtype=numpy.uint32)
        torch.sqrt(torch.from_numpy(bits.view(numpy.float32))).numpy().tofile(sys.argv[4])
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        param = torch.rand(elems) - 0.5
        param.grad = torch.rand(elems) * 0.1 - 0.05
        optimizer = torch.optim.AdamW([param], weight_decay=0.01, **how)
        optimizer.step()
        best = min(timed(optimizer) for _ in range(repeats))
        print(f"torch AdamW {how} {best * 1e3:8.2f} ms, {best * 1e9 / elems:6.2f} ns an element", flush=True)


def timed(optimizer):
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
