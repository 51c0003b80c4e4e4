# SPDX-License-Identifier: Apache-2.0
"""Random models in DeepSpeed: trains and saves, or resumes, and gathers the whole state of the engine as a tree.

The tree has the same form for every program (trees.py): "model" is the whole state dict, "optim" has the master weight and the
optimizer's states of every parameter, "groups" the hyper-parameters, "engine" the counters that only this program has.
"""

import contextlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it sets the environment up
import deepspeed
import torch
import torch.distributed as dist

import build
import tensors
import trees

STEPS, LATE = 3, 1  # before the checkpoint; late parts are frozen from this step on
NEXT = 3            # after it
SUB_GROUP = 1_000_000_000  # DeepSpeed's default
NOTE = {"note": "client state", "nested": {"numbers": [1, 2.5, None]}}


def configuration(case, layout, universal):
    run, world = case["run"], dist.get_world_size()
    zero = {"stage": layout["zero"], "round_robin_gradients": bool(layout.get("round_robin")), "overlap_comm": False}
    if layout["zero"] == 3:
        zero["stage3_param_persistence_threshold"] = 10
        zero["sub_group_size"] = layout.get("sub_group") or SUB_GROUP
    config = {"train_batch_size": build.SAMPLES, "train_micro_batch_size_per_gpu": build.SAMPLES // world,
              "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
              "gradient_clipping": 0.0, "checkpoint": {"load_universal": universal}}
    if run.get("schedule"):
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 7}}
    if dtype_of(case) == "bf16":
        config["bf16"] = {"enabled": True}
        if run.get("fp32_gradients") and layout["zero"] == 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif dtype_of(case) == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    return config


def dtype_of(case):
    return case["run"].get("dtype", "fp32")


def make_engine(case, layout, seed, universal=False):
    if dtype_of(case) == "fp16":
        from deepspeed.accelerator import get_accelerator
        get_accelerator().is_fp16_supported = lambda: True  # PyTorch computes without fp16 instructions too
    model = build.make_model(case, seed)
    if case["run"].get("excluded"):
        build.load_base(model, case)
    groups = build.make_groups(model, case)
    if case["optimizer"]["named"] and not layout["zero"]:  # without ZeRO only names identify parameters
        names = build.names_of(model)
        for group in groups:
            group["params"] = [(names[id(weight)], weight) for weight in group["params"]]
    optimizer = build.make_optimizer(groups, case)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(case, layout, universal))[0]
    if layout["zero"] == 3:
        for module in engine.module.modules():
            if isinstance(module, (build.List, build.Dict)):  # they use parameters of another module
                for weight in module.parameters():
                    deepspeed.zero.register_external_parameter(module, weight)
    return engine


def freeze_late(engine, case):
    for weight in build.late_weights(engine.module, case):
        weight.requires_grad_(False)


def train_step(engine, case, step):
    x, y = build.batch(case, step, dist.get_rank(), dist.get_world_size())
    loss = engine(x.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype_of(case), torch.float32)), y)
    engine.backward(loss)
    engine.step()
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def outer_groups(engine, stage):
    """Parameters with the tensor that the optimizer updates for them: [(weights, tensor)]."""
    outer = engine.optimizer
    if stage == 3:
        return list(zip(outer.fp16_groups, outer.fp32_partitioned_groups_flat))
    if stage:
        bf16 = hasattr(outer, "bf16_groups")
        return list(zip(outer.bf16_groups if bf16 else outer.round_robin_bit16_groups,
                        outer.fp32_groups_flat_partition if bf16 else outer.single_partition_of_fp32_groups))
    if hasattr(outer, "fp32_groups"):
        return [([weight], master) for pair in zip(outer.fp16_groups, outer.fp32_groups) for weight, master in zip(*pair)]
    return [([weight], weight) for group in outer.param_groups for weight in group["params"]]


def optimizer_tree(engine, stage, names):
    """Collective."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = {}
    for weights, master in outer_groups(engine, stage):
        for weight in weights:
            name = names[id(weight)]
            if not stage:
                found[name] = {key: value.float().clone() for key, value in tensors.own_states(base, master).items()}
            step = base.state.get(master, {}).get("step")
            if step is not None:
                found.setdefault(name, {})["step"] = float(step)
    if stage:
        read = tensors.stage_3 if stage == 3 else tensors.stages_1_and_2
        for name, tensor in read(engine, names).items():
            name, state = name.rsplit("/", 1)
            found.setdefault(name, {})[state] = tensor.detach().float().clone()
    return found


def engine_tree(engine, case):
    found = {"steps": engine.global_steps, "skipped": engine.skipped_steps, "samples": engine.global_samples}
    if engine.lr_scheduler:
        found["schedule"] = engine.lr_scheduler.state_dict()
    if dtype_of(case) == "fp16":
        outer = engine.optimizer
        scaler = getattr(outer, "loss_scaler", getattr(outer, "loss_scale_config", outer))
        found["scaler"] = {key: getattr(scaler, key) for key in ("cur_scale", "cur_iter", "last_overflow_iter")}
    return found


def tree_of(engine, case, layout, client):
    """Collective. The whole state of the engine, on every rank."""
    stage = layout["zero"]
    names = build.names_of(engine.module)
    with contextlib.ExitStack() as stack:
        if stage == 3:
            stack.enter_context(deepspeed.zero.GatheredParameters(list(engine.module.parameters())))
        model = {key: trees.copied(value) for key, value in engine.module.state_dict().items()}
    groups = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in engine.optimizer.param_groups]
    return {"model": model, "optim": optimizer_tree(engine, stage, names), "groups": trees.copied(groups),
            "engine": engine_tree(engine, case) | {"client": client},
            "aliases": build.first_names(engine.module)}


def keep(tree, path):
    if dist.get_rank() == 0:
        torch.save(tree, path)
    dist.barrier()


def make(folder, case):
    """Collective. Trains, saves folder/ckpt and the tree of that moment, and trains on: the losses."""
    folder, layout = pathlib.Path(folder), case["run"]
    engine = make_engine(case, layout, build.BASE)
    for step in range(STEPS):
        if step == LATE:
            freeze_late(engine, case)
        train_step(engine, case, step)
    engine.save_checkpoint(str(folder / "ckpt"), client_state=dict(NOTE), exclude_frozen_parameters=bool(layout.get("excluded")))
    keep(tree_of(engine, case, layout, NOTE), folder / "live.pt")
    return [train_step(engine, case, STEPS + step) for step in range(NEXT)]


def take_late_weights(engine, case, live):
    """Gives an engine the late-frozen weights of a tree, which the trainer has left out of its checkpoint."""
    late = {id(weight) for weight in build.late_weights(engine.module, case)}
    weights = torch.load(live, weights_only=False)["model"]
    for name, weight in engine.module.named_parameters(remove_duplicate=False):
        if id(weight) in late and weight.shape == weights[name].shape:  # at stage 3 the optimizer restores them
            weight.data.copy_(weights[name])


def resume(checkpoint, case, layout, tree, universal=False, live=None):
    """Collective. Loads into an engine that began with other weights; keeps its tree, and continues training: the
    losses.

    live: None, or a tree; the engine takes its late-frozen weights."""
    engine = make_engine(case, layout, 107, universal)
    freeze_late(engine, case)
    path, client = engine.load_checkpoint(str(checkpoint), load_module_strict=not case["run"].get("excluded"))
    if path is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {checkpoint}")
    if live:
        take_late_weights(engine, case, live)
    keep(tree_of(engine, case, layout, {key: client.get(key) for key in NOTE}), tree)
    return [train_step(engine, case, STEPS + step) for step in range(NEXT)]
