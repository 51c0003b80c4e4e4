#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the operators for replicated experts on the CPU and prints a Markdown table.

    experts_bench.py [--build build/release] [--runs 9] [--threads 2]

pack, unpack: 4096 bfloat16 tokens of 4096 elements, each for two of 16 experts on 4 ranks, against a copy of as many bytes.
Times are medians of runs in turns. gather: 4 ranks (gloo), 16 experts of 4 MiB of which two are copied everywhere, against an
all-gather of all experts. Needs a Python with PyTorch and the target sw_torch.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/interop/live"))


def times_of(runs, *works):
    """Seconds of each work, the medians of `runs` in turns."""
    found = [[] for _ in works]
    for _ in range(runs):
        for times, work in zip(found, works):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in found]


def row(name, bytes_moved, ours, theirs):
    print(f"| {name} | {bytes_moved / ours / 1e9:.2f} GB/s | {bytes_moved / theirs / 1e9:.2f} GB/s | {theirs / ours:.2f} |")


def tokens(runs, threads):
    from shardwright._library import operators
    ops = operators()
    torch.set_num_threads(threads)
    count, hidden = 4096, 4096
    given = torch.randn(count, hidden).to(torch.bfloat16)
    experts, ranks = 16, 4
    chosen = torch.rand(count, experts, generator=torch.Generator().manual_seed(1)).topk(2).indices
    loads = ops.count_experts(chosen, experts).unsqueeze(1).expand(-1, ranks).contiguous()
    held = torch.eye(ranks, dtype=torch.int64).repeat(experts // ranks, 1)
    place = ops.dispatch_plan(chosen, loads, held, torch.zeros(ranks, dtype=torch.int64), "capacity", 0)[0]
    weights = torch.full((count, 2), 0.5)
    rows = ops.pack_tokens(given, place, None, 2 * count)
    moved = 2 * rows.numel() * rows.element_size()
    ours, theirs, torchs = times_of(runs, lambda: ops.pack_tokens(given, place, None, 2 * count), rows.clone,
                                lambda: given.repeat_interleave(2, 0).index_select(0, place.reshape(-1)))
    row("pack_tokens against clone of the rows", moved, ours, theirs)
    row("pack_tokens against two operators of PyTorch", moved, ours, torchs)
    ours, theirs, torchs = times_of(runs, lambda: ops.unpack_tokens(rows, place, weights), rows.clone,
                                lambda: (rows[place].float() * weights.unsqueeze(-1)).sum(1).to(torch.bfloat16))
    row("unpack_tokens with weights against clone of the rows", moved, ours, theirs)
    row("unpack_tokens against operators of PyTorch", moved, ours, torchs)


def gather(rank, folder, runs):
    from shardwright import SparseCollectives
    ranks, experts, elems = dist.get_world_size(), 16, 1 << 20
    owner = [expert // (experts // ranks) for expert in range(experts)]
    holders = [list(range(ranks)) if expert in (0, 9) else [owner[expert]] for expert in range(experts)]
    held = {expert: [torch.full((elems,), float(expert))] for expert in range(experts) if rank in holders[expert]}
    sparse = SparseCollectives(held[owner.index(rank)])
    mine = torch.cat([held[expert][0] for expert in range(experts) if owner[expert] == rank])
    whole = torch.empty(experts * elems)
    works = []
    for work in (lambda: sparse.all_gather(held, owner, holders), lambda: dist.all_gather_into_tensor(whole, mine)):
        def together(work=work):
            work()
            dist.barrier()
        works.append(together)
    ours, theirs = times_of(runs, *works)
    assert all((held[expert][0] == expert).all() for expert in held)
    if rank == 0:
        (folder / "times").write_text(f"{ours} {theirs}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(options.build / "python"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import moe_replicas as example
    import shardwright
    print("| | ours | theirs | theirs / ours in time |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        example.launch(4, folder, gather, options.runs, seconds=300)
        ours, theirs = map(float, (pathlib.Path(folder) / "times").read_text().split())
    print(f"| sparse all-gather of 2 of 16 experts against all-gather of all | {ours * 1e3:.0f} ms | {theirs * 1e3:.0f} ms | {theirs / ours:.2f} |")
    tokens(options.runs, options.threads)


if __name__ == "__main__":
    main()
