# SPDX-License-Identifier: Apache-2.0
"""Random models in PyTorch alone: FSDP2, HSDP, DDP or one process, saved and loaded by torch.distributed.checkpoint.

Trees have the form of those of in_deepspeed.py, without "engine".
"""

import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import build
import trees
from in_deepspeed import LATE, NEXT, STEPS, keep


def make_run(case, layout, seed):
    """(the module to call, the model, its optimizer)"""
    model = build.make_model(case, seed)
    if case["run"].get("excluded"):
        build.load_base(model, case)
    world, engine = dist.get_world_size(), layout["engine"]
    groups = build.make_groups(model, case)
    if engine in ("fsdp2", "hsdp"):
        places = build.names_of(model)
        for group in groups:
            group["names"] = [places[id(weight)] for weight in group.pop("params")]
        shard(model, case, layout, world)
        weights = dict(model.named_parameters(remove_duplicate=False))
        for group in groups:
            group["params"] = [weights[name] for name in group.pop("names")]
    called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if engine == "ddp" else model
    return called, model, build.make_optimizer(groups, case)


def shard(model, case, layout, world):
    """Each part is a unit, unless its weights are tied to those of another; then the whole model is one."""
    hsdp = layout["engine"] == "hsdp"
    mesh = init_device_mesh("cpu", (world, 1) if hsdp else (world,), mesh_dim_names=("copies", "shards") if hsdp else ("shards",))
    whole = {weight for part in case["parts"] if part["kind"] == "quant" for weight in model.at(part["path"]).parameters()
             if not weight.is_floating_point()}
    if layout["units"] and not any({"tie", "share", "unused"} & part.keys() for part in case["parts"]):
        for part in case["parts"]:
            fully_shard(model.at(part["path"]), mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def freeze_late(run, case):
    for weight in build.late_weights(run[1], case):
        weight.requires_grad_(False)


def train_step(run, case, step):
    x, y = build.batch(case, step, dist.get_rank(), dist.get_world_size())
    run[2].zero_grad()
    loss = run[0](x, y)
    loss.backward()
    run[2].step()
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def state_of(run, flat=False, whole=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=whole)
    weights, states = get_state_dict(run[1], run[2], options=options)
    return {"model": weights, "optim": states}


def tree_of(run):
    """Collective. The whole state, on every rank."""
    state = trees.copied(state_of(run, whole=True))
    optim = state["optim"]
    found = {name: {key: float(value) if key == "step" else value for key, value in states.items()}
             for name, states in optim["state"].items()}
    for group in optim["param_groups"]:
        for name in group["params"]:
            found.setdefault(name, {})["fp32"] = state["model"][name]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optim["param_groups"]]
    return {"model": state["model"], "optim": found, "groups": groups, "aliases": build.first_names(run[1])}


def make(folder, case):
    """Collective. As that of in_deepspeed.py."""
    folder = pathlib.Path(folder)
    run = make_run(case, case["run"], build.BASE)
    for step in range(STEPS):
        if step == LATE:
            freeze_late(run, case)
        train_step(run, case, step)
    dcp.save(state_of(run, flat=case["run"]["optim"] == "flat"), checkpoint_id=folder / "ckpt")
    keep(tree_of(run), folder / "live.pt")
    return [train_step(run, case, STEPS + step) for step in range(NEXT)]


def items(folder):
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def asked_items(state, folder):
    """The names of the items that a load of this state asks for."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    return set(planner.state_dict)


def load(run, checkpoint, flat):
    """Collective. Items that the checkpoint lacks stay as they are; returns them, and those that are never read."""
    state = state_of(run, flat=flat)
    there, asked = items(checkpoint), asked_items(state, checkpoint)
    dcp.load(state, checkpoint_id=checkpoint, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(run[1], run[2], model_state_dict=state["model"], optim_state_dict=state["optim"],
                   options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return sorted(asked - there), sorted(there - asked)


def resume(checkpoint, case, layout, tree):
    """Collective. As that of in_deepspeed.py; returns missing and unexpected items, too."""
    run = make_run(case, layout, 107)
    lacking, more = load(run, checkpoint, case["run"].get("optim") == "flat")
    freeze_late(run, case)  # not before: PyTorch asks for no states of frozen parameters
    keep(tree_of(run), tree)
    return {"lacking": lacking, "more": more, "losses": [train_step(run, case, STEPS + step) for step in range(NEXT)]}


def resume_weights(folder, case, tree):
    """Loads the weights of .safetensors files into the model alone; what the files lack."""
    from safetensors.torch import load_file
    state = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        state |= trees.copied(load_file(path))  # of their own storages: torch.save refuses views of one as different types
    keep({"weights": state}, tree)
