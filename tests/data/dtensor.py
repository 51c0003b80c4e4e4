#!/usr/bin/env python3
"""Makes the checkpoints in tests/data/dtensor with PyTorch's fully_shard on CPU ranks.

    dtensor.py FOLDER [NAME...]     makes FOLDER/NAME for the named cases, for all without names

Each is a folder: `ckpt`, a file for each rank and item as torch.save writes it under verl's names, or
under Accelerate's by its own functions, and `expected.safetensors`, every tensor as the trainer held it:
NAME/fp32, NAME/exp_avg, NAME/exp_avg_sq, NAME/buffer, gathered from the memory of the ranks. Extents of
the model are odd, so that no mesh divides them.

The form of a pickled mesh is that of the running PyTorch: run a case `old_...` with 2.6 or 2.9, others with 2.15.
"""

import json
import os
import pathlib
import subprocess
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# name: ranks, names and sizes of the mesh, and who saves
CASES = {
    "fsdp_w1": {"mesh": {"fsdp": 1}},
    "fsdp_w3": {"mesh": {"fsdp": 3}},
    "hsdp_w4": {"mesh": {"ddp": 2, "fsdp": 2}},
    "fsdp2_tp2_w4": {"mesh": {"fsdp": 2, "tp": 2}},
    "tp2x2_w4": {"mesh": {"tp0": 2, "tp1": 2}},
    "flat_w2": {"mesh": {"fsdp": 2}, "fsdp": 1},
    "accelerate_w2": {"mesh": {"fsdp": 2}, "accelerate": True},
    "old_fsdp_w3": {"mesh": {"fsdp": 3}},
}
WIDTH, HIDDEN, VOCAB, STEPS = 6, 7, 11, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("positions", torch.arange(5, dtype=torch.float32))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous().clone()


def shard_twice(model, mesh):
    """Shards rows by the first dimension of the mesh, and columns by the second one."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(1) if parameter.dim() > 1 else Replicate()]
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


def wrap(model, case, mesh):
    if case.get("fsdp") == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_mesh=mesh,
                                        device_id=torch.device("cpu"), use_orig_params=False)
    if "tp0" in case["mesh"]:
        return shard_twice(model, mesh)
    over = mesh
    if "tp" in case["mesh"]:
        parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
        over = mesh["fsdp"]
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def gathered(model, optimizer):
    found = {}
    for name, parameter in model.named_parameters():
        found[f"{name}/fp32"] = whole(parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{state}"] = whole(optimizer.state[parameter][state])
    for name, buffer in model.named_buffers():
        found[f"{name}/buffer"] = whole(buffer)
    return found


def gathered_flat(model, optimizer):
    """FSDP1 hands out what it has in flat vectors by name."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FSDP.optim_state_dict(model, optimizer)["state"]
        found = {f"{name}/fp32": value for name, value in model.state_dict().items() if name != "positions"}
        found["positions/buffer"] = model.state_dict()["positions"]
    for name, slots in states.items():
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{state}"] = slots[state]
    return {name: whole(value) for name, value in found.items()}


def save_as_verl(folder, case, model, optimizer):
    rank, world = dist.get_rank(), dist.get_world_size()
    if case.get("fsdp") == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False),
                                 ShardedOptimStateDictConfig(offload_to_cpu=False))
    items = {"model": model.state_dict(), "optim": optimizer.state_dict(),
             "extra_state": {"lr_scheduler": {"last_epoch": STEPS}, "rng": {"cpu": torch.full((24,), rank, dtype=torch.uint8)}}}
    for item, value in items.items():
        torch.save(value, folder / f"{item}_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": case.get("fsdp", 2), "world_size": world}))


def save_as_accelerate(folder, model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    rank = dist.get_rank()
    torch.save(dict(model.state_dict()), folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(get_optimizer_state_dict(model, optimizer), folder / f"optimizer_0_rank{rank}.bin")


def train(folder, name):
    case = CASES[name]
    dist.init_process_group("gloo")
    sizes = case["mesh"]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(7)
    model = wrap(Model(), case, mesh)
    groups = [{"params": list(model.parameters())}]
    if case.get("accelerate"):
        flat = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": flat, "weight_decay": 0.0, "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        for parameter in model.parameters():  # gradients from nowhere: the files are what matters
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                piece = parameter._local_tensor
                local = DTensor.from_local(torch.randn(piece.shape), parameter.device_mesh, parameter.placements,
                                           shape=parameter.shape, stride=parameter.stride(), run_check=False)
                if any(one.is_replicate() for one in parameter.placements) or parameter.device_mesh.ndim < mesh.ndim:
                    local._local_tensor.fill_(0.5 + step)
                gradient = local
            parameter.grad = gradient
        optimizer.step()
    place = pathlib.Path(folder) / name / "ckpt"
    place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    expected = gathered_flat(model, optimizer) if case.get("fsdp") == 1 else gathered(model, optimizer)
    if case.get("accelerate"):
        save_as_accelerate(place, model, optimizer)
    else:
        save_as_verl(place, case, model, optimizer)
    if dist.get_rank() == 0:
        save_file(expected, place.parent / "expected.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main():
    if "RANK" in os.environ:
        train(sys.argv[1], sys.argv[2])
        return
    old = torch.__version__ < "2.10" or torch.__version__.startswith(("2.6", "2.9"))
    for name in sys.argv[2:] or [name for name in CASES if name.startswith("old_") == old]:
        ranks = 1
        for size in CASES[name]["mesh"].values():
            ranks *= size
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29683",
                        __file__, sys.argv[1], name], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
