#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint of real size with real DeepSpeed on CPU ranks, for benchmarks.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 make_checkpoint.py OUT [--hidden 1024] [--layers 32] [--vocab 32000]

A stack of feed-forward blocks between an embedding and a head, bf16, ZeRO-2, AdamW, two parameter groups, one step.
The defaults give 334 million parameters and 4.7 GB.
"""
import argparse
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from torch import nn


class Block(nn.Module):
    """Normalised feed-forward with a residual: cheap to train, with the shapes of a transformer layer."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.mix = nn.Linear(3 * hidden, hidden, bias=False)
        self.widen = nn.Linear(hidden, hidden)
        self.narrow = nn.Linear(hidden, hidden)

    def forward(self, x):
        y = self.mix(torch.tanh(self.query_key_value(self.norm(x))))
        return x + self.narrow(torch.relu(self.widen(y)))


class Model(nn.Module):
    def __init__(self, hidden, layers, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make_engine(hidden, layers, vocab, **config):
    """Collective. An engine in the layout of `config`, more of DeepSpeed's own."""
    torch.manual_seed(1)
    model = Model(hidden, layers, vocab)
    wide = [p for p in model.parameters() if p.dim() > 1]
    thin = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}], lr=1e-4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    } | config
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine, vocab):
    """Collective. One step, which creates the state of the optimizer."""
    engine.backward(engine(torch.randint(0, vocab, (1, 8))))
    engine.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine = make_engine(args.hidden, args.layers, args.vocab)
    train(engine, args.vocab)
    engine.save_checkpoint(args.out)


if __name__ == "__main__":
    main()
