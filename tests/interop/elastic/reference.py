# SPDX-License-Identifier: Apache-2.0
"""The losses of train.py, computed by one plain process that has every expert and does not use Shardwright."""

import torch
from torch.nn.functional import gelu

import train


def losses(steps):
    """The losses of the first steps."""
    gates = [torch.nn.Parameter(train.random(f"gate {layer}", train.HIDDEN, train.EXPERTS)) for layer in range(train.LAYERS)]
    head = torch.nn.Parameter(train.random("head", train.HIDDEN, 1))
    experts = [[(torch.nn.Parameter(train.random(f"{layer} {expert} in", train.HIDDEN, train.INNER) / 4),
                 torch.nn.Parameter(train.random(f"{layer} {expert} out", train.INNER, train.HIDDEN) / 4))
                for expert in range(train.EXPERTS)] for layer in range(train.LAYERS)]
    parameters = [*gates, head, *(one for layer in experts for pair in layer for one in pair)]
    optimizer = torch.optim.AdamW(parameters, lr=train.RATE, weight_decay=0.1)
    found = []
    for step in range(steps):
        tokens, wanted = train.batch(step)
        for gate, layer in zip(gates, experts):
            weights, chosen = (tokens @ gate).softmax(-1).topk(train.CHOICES, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            outputs = torch.stack([gelu(tokens @ up) @ down for up, down in layer], 1)
            picked = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, train.HIDDEN))
            tokens = tokens + (weights.unsqueeze(-1) * picked).sum(1)
        loss = ((tokens @ head - wanted) ** 2).sum() / train.BATCH
        optimizer.zero_grad()
        loss.backward()
        for one in parameters:  # an expert without tokens gets zeros, as its replicas do
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        optimizer.step()
        found.append(loss.item())
    return found
