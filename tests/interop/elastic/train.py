#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An elastic trainer: DistributedDataParallel for gates and head, two layers of replicated experts, AdamW, all in float64. torchrun
starts it on each node; nodes may fail and join.

    python -m shardwright.elastic node TORCHRUN-ARGUMENTS train.py RUN STEPS [--save-every N] [--wait S] [--command MOE-REPLACE]
                                                                  [--losses FILE] [--pause S]
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

HIDDEN, INNER, EXPERTS, CHOICES, LAYERS, BATCH, SLOTS = 12, 20, 8, 2, 2, 60, 6
RATE = 1e-3
PATIENCE = 30  # seconds of a collective


def random(name, *shape):
    """The same numbers at every call."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(step):
    """Tokens of the whole batch and the expected outputs. Some experts are hotter than others, and others later."""
    tokens = random(f"tokens {step}", BATCH, HIDDEN) + random(f"drift {step // 8}", 1, HIDDEN)
    return tokens, random(f"wanted {step}", BATCH, 1)


class Expert(torch.nn.Module):
    def __init__(self, layer, expert):
        super().__init__()
        self.up = torch.nn.Parameter(random(f"{layer} {expert} in", HIDDEN, INNER) / 4)
        self.down = torch.nn.Parameter(random(f"{layer} {expert} out", INNER, HIDDEN) / 4)

    def forward(self, tokens):
        return gelu(tokens @ self.up) @ self.down


class Layer(torch.nn.Module):
    """experts: numbers of the experts on this rank."""

    def __init__(self, layer, experts):
        super().__init__()
        self.gate = torch.nn.Parameter(random(f"gate {layer}", HIDDEN, EXPERTS))
        self.experts = torch.nn.ModuleDict({str(expert): Expert(layer, expert) for expert in experts})
        self.replicas, self.tokens = None, None  # ReplicatedExperts of this layer; tokens of the last step by expert

    def forward(self, tokens):
        weights, chosen = (tokens @ self.gate).softmax(-1).topk(CHOICES, -1)
        self.tokens = torch.bincount(chosen.reshape(-1), minlength=EXPERTS)
        sent = self.replicas.dispatch(tokens, chosen)
        rows = torch.cat([self.experts[str(expert)](rows) for expert, rows in sent.by_expert()])
        return tokens + self.replicas.combine(rows, sent, weights / weights.sum(-1, keepdim=True))


class Model(torch.nn.Module):
    """experts: by layer."""

    def __init__(self, experts):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(layer, of) for layer, of in enumerate(experts)])
        self.head = torch.nn.Parameter(random("head", HIDDEN, 1))

    def forward(self, tokens):
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens @ self.head


def die_in_migration(folder, node):
    """For tests: if the file dies-in-migration names this node, the whole node dies in the middle of the next migration."""
    mark = folder / "dies-in-migration"
    if not mark.exists() or mark.read_text() != node.rpartition("-")[0]:
        return
    send = dist.batch_isend_irecv

    def dying(pairs):
        done = send(pairs[:len(pairs) // 2]) if len(pairs) > 1 else []
        mark.unlink()
        (folder / "died").write_text(str(time.time()))
        # The launcher with the node's memory, and this rank.
        for pid in (int(os.environ.get("SW_TEST_LAUNCHER", os.getppid())), os.getpid()):
            os.kill(pid, signal.SIGKILL)
        return done

    dist.batch_isend_irecv = dying


def main(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--wait", type=float, default=120)
    parser.add_argument("--command", default="moe-replace")
    parser.add_argument("--losses", type=pathlib.Path, help="append step and loss of each step")
    parser.add_argument("--pause", type=float, default=0, help="seconds between steps")
    options = parser.parse_args(words)
    import shardwright
    import shardwright.elastic
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = shardwright.elastic.Elastic(options.run, layers=LAYERS, experts=EXPERTS, slots=SLOTS, save_every=options.save_every,
                                      wait=options.wait, command=options.command)
    model = Model([[expert for expert, of in enumerate(run.plan.state(layer)) if rank in of] for layer in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    die_in_migration(options.run, os.environ["SHARDWRIGHT_NODE"])
    done = run.load(model, optimizer)
    between = dist.new_group()  # for tokens and gradients of experts: DDP's own messages must not come in between
    for number, layer in enumerate(model.layers):
        layer.replicas = shardwright.ReplicatedExperts(
            run.plan, number, {int(expert): list(one.parameters()) for expert, one in layer.experts.items()}, between)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if ".experts." in name])
    trainer = torch.nn.parallel.DistributedDataParallel(model)
    dense = [one for name, one in model.named_parameters() if ".experts." not in name]
    for step in range(done, options.steps):
        tokens, wanted = (part.tensor_split(ranks)[rank] for part in batch(step))
        loss = ((trainer(tokens) - wanted) ** 2).sum() / BATCH
        optimizer.zero_grad()
        loss.backward()
        for layer in model.layers:
            layer.replicas.sum_gradients()
        for one in dense:  # DistributedDataParallel computes the mean over ranks
            one.grad.mul_(ranks)
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        # Before the step is in memory: a step that is not repeated must be in the file, even if this rank is killed here.
        if rank == 0 and options.losses is not None:
            with options.losses.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": total.item(), "ranks": ranks, "time": time.time()}) + "\n")
        run.step([layer.tokens for layer in model.layers])
        time.sleep(options.pause)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
