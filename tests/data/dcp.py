#!/usr/bin/env python3
"""Makes the checkpoints in tests/data/dcp with PyTorch on CPU ranks: FSDP2, saved with torch.distributed.checkpoint.

Usage: dcp.py OUTPUT

OUTPUT/<case>/ckpt            what torch.distributed.checkpoint.save wrote
OUTPUT/<case>/expected.safetensors  every tensor as the ranks held it, whole: NAME/fp32, NAME/exp_avg, NAME/buffer, ...
nested_w3  three ranks and rows that do not divide, so one rank has none; optimizer nested by parameter and group; client state
flat_w2    two ranks, names as torchtitan has them: model bare, optimizer flat below "optimizer"; train_state
ranks_w3   as nested_w3, saved without collectives: each rank has an index of its own, __R.metadata
strided_w1 one rank: a tensor saved with strides of its own
zstd_w2    two ranks, as nested_w3: items compressed by the extension stream.zstd; needs the package zstandard
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 5)
        self.register_buffer("scale", torch.full((2,), 1.5))

    def forward(self, x):
        return self.up(self.emb(x)) * self.scale[0]


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().contiguous().clone()


def sharded(rank, world, folder, flat, collectives=True, compressed=False):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29567", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), foreach=False)
    for _ in range(STEPS):
        net(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    if not collectives:
        state = {"model": model, "optim": optim, "note": "kept", "rng": torch.arange(20) + rank}
    elif flat:
        state = {**model, "optimizer": optim, "train_state": {"step": STEPS}}
    else:
        state = {"model": model, "optim": optim, "note": "kept", "rng": {f"rank{rank}": torch.arange(20) + rank}}
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # a relative name: the index must not tell where it was written
    writer = FileSystemWriter("ckpt", _extensions=[ZStandard()]) if compressed else None
    dcp.save(state, checkpoint_id="ckpt", storage_writer=writer, use_collectives=collectives)
    held = {f"{n}/buffer": whole(b) for n, b in net.named_buffers()}
    for name, param in net.named_parameters():
        held[f"{name}/fp32"] = whole(param)
        held |= {f"{name}/{k}": whole(optimizer.state[param][k]) for k in ("exp_avg", "exp_avg_sq")}
    if rank == 0:
        save_file(held, "expected.safetensors")
    dist.destroy_process_group()


def strided(folder):
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    dcp.save({"model": {"w": tensor, "v": torch.arange(3, dtype=torch.bfloat16)}}, checkpoint_id="ckpt", no_dist=True)
    save_file({"w/computed": tensor.contiguous(), "v/computed": torch.arange(3, dtype=torch.float32)}, "expected.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = pathlib.Path(sys.argv[1]).resolve()
    mp.spawn(sharded, (3, output / "nested_w3", False), nprocs=3)
    mp.spawn(sharded, (2, output / "flat_w2", True), nprocs=2)
    mp.spawn(sharded, (3, output / "ranks_w3", False, False), nprocs=3)
    strided(output / "strided_w1")
    mp.spawn(sharded, (2, output / "zstd_w2", False, True, True), nprocs=2)
