# SPDX-License-Identifier: Apache-2.0
"""Makes checkpoints with real DeepSpeed, and verifies checkpoints by resuming them.

    train.py make FOLDER CASE --ranks N
    train.py resume CHECKPOINT CASE --ranks N --expect FOLDER [--universal]

CASE is a JSON case of model.py. `make` trains, saves FOLDER/ckpt, keeps every logical
tensor of that moment (FOLDER/tensors.pt), trains on and notes the losses (FOLDER/made.json).
`resume` starts from other weights, loads CHECKPOINT, and wants every tensor bit for bit, the
hyper-parameters, counters and client state, and the same losses as it trains on.
"""

import argparse
import json
import pathlib
import re
import sys

import ranks
import torch
import torch.distributed as dist

import entries
from model import complete, make_engine, train_step
from tensors import logical_tensors, unequal

STEPS = 4  # before the checkpoint, and after it
NOTE = "kept by whoever converts"
# Other partitions add up in another order, and resumed in another precision even more differs.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 1e-2}
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def counters(engine, case):
    """Collective. The contents of a checkpoint besides tensors."""
    kept = ("lr", "weight_decay", "betas", "eps", "momentum", "amsgrad", "k", "weight_sum", "lr_max", "step")
    groups = {}
    for group in engine.optimizer.param_groups:
        name = re.sub(r"ep_size_\d+", "experts", group.get("name", "only"))  # DeepSpeed names them by their ranks
        groups[name] = {key: group[key] for key in kept if key in group}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, groups)  # a pipeline stage has only the groups of its parameters
    found = {"global_steps": engine.global_steps, "groups": {name: group for groups in every for name, group in groups.items()}}
    if engine.lr_scheduler:
        found["scheduler"] = engine.lr_scheduler.state_dict()
    if case["dtype"] == "fp16":
        outer = engine.optimizer
        scaler = getattr(outer, "loss_scaler", getattr(outer, "loss_scale_config", outer))
        found["scaler"] = {key: getattr(scaler, key) for key in ("cur_scale", "cur_iter", "last_overflow_iter")}
    return json.loads(json.dumps(found))


def save(engine, folder, left_out):
    """Collective."""
    if hasattr(engine, "accelerator"):
        engine.accelerator.save_state(folder)
    else:
        engine.save_checkpoint(folder, client_state={"note": NOTE}, exclude_frozen_parameters=left_out)


def load(engine, checkpoint, left_out):
    """Collective. The note in the client state."""
    if hasattr(engine, "accelerator"):
        engine.accelerator.load_state(checkpoint)  # it keeps its client state to itself
        return NOTE
    path, client = engine.load_checkpoint(checkpoint, load_module_strict=not left_out)
    if path is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {checkpoint}")
    return client.get("note")


def make(folder, case):
    """Collective."""
    engine = make_engine(case)
    for step in range(STEPS):
        train_step(engine, case, step)
    save(engine, folder / "ckpt", case["left_out"])
    tensors, counted = logical_tensors(engine, case), counters(engine, case)
    losses = [train_step(engine, case, STEPS + step) for step in range(STEPS)]
    if dist.get_rank() == 0:
        torch.save(tensors, folder / "tensors.pt")
        made = {"case": case, "losses": losses, "counters": counted, "optimizer": type(engine.optimizer).__name__}
        (folder / "made.json").write_text(json.dumps(made, indent=1))
    return {"losses": losses, "optimizer": type(engine.optimizer).__name__}


def differences(got, want, case, universal):
    """Returns a line for each tensor that is not as at the checkpoint."""
    left = ("frozen", "buffer") if universal else ()  # DeepSpeed's universal loader leaves them as they are
    kept = {name: tensor for name, tensor in want.items() if name.rsplit("/", 1)[1] not in left}
    for name in kept:
        if name.endswith("/computed"):  # rounded from the master weights to whatever is computed with now
            kept[name] = want[name.removesuffix("computed") + "fp32"].to(DTYPE[case["dtype"]]).float()
    return unequal({name: tensor for name, tensor in got.items() if name in kept or name not in want}, kept)


def resume(checkpoint, case, folder, universal, steps, load_it):
    """Collective. Lists the differences, and how much was compared; of the losses the first `steps`."""
    made = json.loads((folder / "made.json").read_text())
    engine = make_engine(case | {"seed": case["seed"] + 1000}, universal)
    for buffer in engine.module.buffers():
        buffer.mul_(0.5)
    note = load_it(engine, checkpoint, case["left_out"])
    want = torch.load(folder / "tensors.pt", weights_only=True)
    wrong = differences(logical_tensors(engine, case), want, case, universal)
    if case["entries"]:
        wrong += entries.wrong(engine.module)
    if note != NOTE:
        wrong.append(f"client state: {note!r}")
    counted = counters(engine, case)
    if made["case"]["elastic"]:
        # Such a checkpoint holds no hyper-parameters: the first step has the learning rate of the configuration.
        del counted["groups"]
    for name, group in counted.get("groups", {}).items():  # torch adds options of its own when it loads
        counted["groups"][name] = {key: value for key, value in group.items() if key in made["counters"]["groups"][name]}
    for key in counted.keys() & made["counters"].keys():
        if counted[key] != made["counters"][key]:
            wrong.append(f"{key}: {counted[key]} for {made['counters'][key]}")
    losses = [train_step(engine, case, STEPS + step) for step in range(steps)]
    off = max(abs(a - b) / max(1, abs(b)) for a, b in zip(losses, made["losses"]))
    allowed = max(TOLERANCE[case["dtype"]], TOLERANCE[made["case"]["dtype"]])
    if not (off <= allowed or made["case"]["elastic"] and max(losses) < made["losses"][0]):
        wrong.append(f"losses {losses} for {made['losses']}: off by {off:.3g}, allowed {allowed}")
    return {"wrong": wrong, "tensors": len(want), "loss_off": off}


def make_case(folder, case, world):
    """Makes a checkpoint on `world` ranks; the name of DeepSpeed's optimizer class."""
    folder.mkdir(parents=True, exist_ok=True)
    return ranks.run(world, make, folder, complete(case))["optimizer"]


def resume_case(checkpoint, case, world, folder, universal=False, steps=STEPS, load_it=load):
    """Resumes a checkpoint on `world` ranks; see resume(). `load_it` does what load() does."""
    return ranks.run(world, resume, checkpoint, complete(case), folder, universal, steps, load_it)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("make", "resume"))
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("case", type=json.loads)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--expect", type=pathlib.Path)
    parser.add_argument("--universal", action="store_true")
    given = parser.parse_args()
    if given.mode == "make":
        print(make_case(given.path, given.case, given.ranks))
        return 0
    if not given.expect:
        parser.error("resume needs --expect")
    report = resume_case(given.path, given.case, given.ranks, given.expect, given.universal)
    print("\n".join(report["wrong"] or [f"{report['tensors']} tensors equal, losses off by {report['loss_off']:.3g}"]))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
