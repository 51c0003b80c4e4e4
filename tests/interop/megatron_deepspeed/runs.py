# SPDX-License-Identifier: Apache-2.0
"""Trains the models of gpt.py with real DeepSpeed, saves, and resumes checkpoints in other layouts.

    make_case trains and saves FOLDER/ckpt, keeps every whole tensor of that moment (FOLDER/tensors.pt), and trains on.
    resume_case starts from other weights, loads a checkpoint, compares and trains on.
"""

import json
import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it prepares DeepSpeed
import torch
import torch.distributed as dist

import gpt
import parallel
from tensors import stages_1_and_2, unequal

STEPS = 4  # before the checkpoint, and after it


def own_tensors(engine):
    """Returns those of this rank by name, each with its cut: master weights, moments, and the weights that are computed with."""
    names, cuts = {}, {}
    for name, weight in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), name)
        cuts.setdefault(name, weight.cut)
    found = {name: (tensor, cuts[name.rsplit("/", 1)[0]]) for name, tensor in stages_1_and_2(engine, names).items()}
    for name, weight in engine.module.named_parameters():
        found[f"{name}/computed"] = (weight.detach(), weight.cut)
    return {name: (tensor.detach().clone(), cut) for name, (tensor, cut) in found.items()}


def whole_tensors(engine, case):
    """Collective. Raises if ranks that hold the same piece hold different values. A tied module's values are those of the
    first stage: DeepSpeed keeps only the word embeddings equal, and the last stage computes with nothing else of it."""
    every = [None] * dist.get_world_size()
    mine = engine.grid.get_pipe_parallel_rank(), engine.grid.get_slice_parallel_rank(), own_tensors(engine)
    dist.all_gather_object(every, mine)
    pieces = {}
    for stage, tp, found in sorted(every, key=lambda one: one[:2]):
        for name, (tensor, cut) in found.items():
            if stage > 0 and name.startswith("tied_modules.") and "word_embeddings.weight" not in name:
                continue
            first = pieces.setdefault(name, ({}, cut))[0].setdefault(tp, tensor)
            if not torch.equal(first, tensor):
                raise AssertionError(f"ranks hold different values of {name}")
    whole = {}
    for name, (parts, cut) in pieces.items():
        parts = [parts[tp] for tp in range(case["tp"])]
        if cut == parallel.REPLICATED and not all(torch.equal(part, parts[0]) for part in parts):
            if not case["average"]:
                raise AssertionError(f"tensor-parallel ranks hold different values of {name}")
            parts = [sum(parts) / len(parts)]
        whole[name] = parallel.joined(parts, cut)
        if "word_embeddings.weight" in name or "lm_head" in name:
            whole[name] = whole[name][:case["vocab"]]
    return whole


def counters(engine):
    """Collective. Returns the contents of a checkpoint besides tensors and client state."""
    groups = [{key: group[key] for key in ("lr", "weight_decay", "betas", "eps", "wd_mult", "lr_mult")}
              for group in engine.optimizer.param_groups]
    steps = sorted({float(state["step"]) for state in inner_optimizer(engine).state.values()})
    return json.loads(json.dumps({"global_steps": engine.global_steps, "samples": engine.global_samples, "groups": groups,
                                  "steps": steps, "scheduler": engine.lr_scheduler.state_dict()}))


def inner_optimizer(engine):
    return engine.optimizer.optimizer


def make(folder, case):
    """Collective."""
    engine = gpt.make_engine(case)
    before = [gpt.train_step(engine, case, step) for step in range(STEPS)]
    engine.save_checkpoint(folder / "ckpt", client_state=gpt.client_state(case, STEPS))
    tensors, counted = whole_tensors(engine, case), counters(engine)
    losses = [gpt.train_step(engine, case, STEPS + step) for step in range(STEPS)]
    if dist.get_rank() == 0:
        torch.save(tensors, folder / "tensors.pt")
        made = {"case": case, "before": before, "losses": losses, "counters": counted}
        (folder / "made.json").write_text(json.dumps(made, indent=1))
    return {"losses": before + losses, "optimizer": type(engine.optimizer).__name__}


def resume(checkpoint, case, folder, universal, again):
    """Collective. Lists the differences, how much was compared, and by how much the losses differ. `again`: a folder to save
    to before training on."""
    made = json.loads((folder / "made.json").read_text())
    engine = gpt.make_engine(case | {"seed": case["seed"] + 1000}, universal)
    path, client = engine.load_checkpoint(checkpoint)
    if path is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {checkpoint}")
    got, want = whole_tensors(engine, case), torch.load(folder / "tensors.pt", weights_only=True)
    wrong = unequal(got, want)
    if not universal:  # Megatron does not compare these for a universal checkpoint
        wrong += gpt.rejected_arguments(client["args"], case)
    if client["iteration"] != STEPS or client["args"].params_dtype != gpt.DTYPE[case["dtype"]]:
        wrong.append(f"client state: {client['iteration']}, {client['args']}")
    counted = counters(engine)
    for key in counted:
        if counted[key] != made["counters"][key]:
            wrong.append(f"{key}: {counted[key]} for {made['counters'][key]}")
    if again is not None:
        engine.save_checkpoint(again, client_state=gpt.client_state(case, STEPS))
    losses = [gpt.train_step(engine, case, STEPS + step) for step in range(STEPS)]
    off = max(abs(a - b) / max(1, abs(b)) for a, b in zip(losses, made["losses"]))
    return {"wrong": wrong, "tensors": len(want), "losses": losses, "loss_off": off}


def make_case(folder, case):
    """Makes a checkpoint. Returns the losses of the run and the name of DeepSpeed's optimizer class."""
    case = gpt.complete(case)
    folder.mkdir(parents=True, exist_ok=True)
    return ranks.run(gpt.ranks_of(case), make, folder, case)


def resume_case(checkpoint, case, folder, universal=False, again=None):
    """Resumes a checkpoint of the run in `folder`; see resume()."""
    case = gpt.complete(case)
    return ranks.run(gpt.ranks_of(case), resume, checkpoint, case, folder, universal, again)
