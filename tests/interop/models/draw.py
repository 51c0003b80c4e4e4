# SPDX-License-Identifier: Apache-2.0
"""Draws descriptions of random models from seeds. A description is JSON: a list of parts (modules below a path of names, each
with its features), an optimizer, the layout of the run that makes the checkpoint, and the conversions to verify.

A model maps [samples, width] to the same shape, part after part, so any part can be dropped and the rest still trains.
"""

import random

import switches

PROGRAMS = ("deepspeed", "torch", "megatron")
# Of ten models in a row: the program that trains each.
TURNS = ("deepspeed", "torch", "deepspeed", "megatron", "deepspeed", "torch", "deepspeed", "torch", "deepspeed", "torch")
KINDS = ("linear", "linear", "mlp", "norm", "vector", "list", "dict", "cube", "quant")
NAMES = ("enc", "dec", "a", "b", "proj", "enc/layer", "0", "1", "x/y", "head", "w_1", "model", "module")
EXTRAS = ("tensor", "empty", "none", "dict", "bytes")
BUFFERS = ("float", "int", "bool", "scalar", "strided", "temporary", "absent", "column")


class Dice:
    """Random choices of one seed, without the features that are switched off."""

    def __init__(self, program, seed):
        self.random = random.Random(f"{program} {seed}")
        self.program = program

    def may(self, feature, chance):
        """Decides whether to have a feature. Draws in any case, so that a switch changes nothing else."""
        drawn = self.random.random() < chance
        return drawn and not switches.is_off(self.program, feature)

    def one(self, choices):
        return self.random.choice(choices)

    def number(self, least, most):
        return self.random.randint(least, most)


def path_of(dice, taken):
    """A name of one to three components that no other part has, or is below of."""
    while True:
        words = [dice.one(NAMES) for _ in range(dice.number(1, 3))]
        if switches.is_off(dice.program, "slash"):
            words = [word.replace("/", "_") for word in words]
        path = ".".join(words)
        if not any(path == other or path.startswith(other + ".") or other.startswith(path + ".") for other in taken):
            return path


def states_of_training(dice, part):
    """Adds whether a part is trained, from when on it is frozen, and its memory layout."""
    if part["kind"] == "quant":
        return
    if dice.may("frozen", 0.18):
        part["frozen"] = dice.one(("all", "first"))
    elif dice.may("late", 0.12):
        part["late"] = True
    if dice.may("strided", 0.3) and part.get("frozen") == "all":  # ZeRO refuses trained parameters that are not row-major
        part["strided"] = True
    if dice.may("unused", 0.12):
        part["unused"] = True


def features_of(dice, part, parts):
    """Adds features to a part; `parts` are those before it. \returns the part"""
    own = [at for at, other in enumerate(parts) if "share" not in other]
    if own and dice.may("shared", 0.1):
        return {"path": part["path"], "share": dice.one(own)} | {key: parts[0][key] for key in ("kind", "bias", "inner")}
    states_of_training(dice, part)
    alike = [at for at in own if parts[at]["kind"] == part["kind"] == "linear" and "tie" not in parts[at]]
    if alike and dice.may("tied", 0.4):
        part["tie"] = dice.one(alike)
    if dice.may("extra", 0.2):
        extra = dice.one(EXTRAS)
        if not switches.is_off(dice.program, f"extra {extra}"):
            part["extra"] = extra
    if dice.may("buffers", 0.3):
        kinds = sorted({dice.one(BUFFERS) for _ in range(dice.number(1, 3))})
        part["buffers"] = [kind for kind in kinds if not switches.is_off(dice.program, f"buffer {kind}")]
    return part


def parts_of(dice):
    parts = []
    for _ in range(dice.number(2, 6)):
        kind = dice.one(KINDS)
        if switches.is_off(dice.program, kind):
            kind = "linear"
        part = {"path": path_of(dice, [other["path"] for other in parts]), "kind": kind, "bias": dice.may("bias", 0.6),
                "inner": dice.number(2, 11)}
        parts.append(features_of(dice, part, parts))
    frozen = {part["tie"] for part in parts if "tie" in part and {"frozen", "late"} & part.keys()}  # with the weight tied to it
    if not any(trains(part) and at not in frozen for at, part in enumerate(parts)):  # an optimizer needs something
        parts[0] = {"path": parts[0]["path"], "kind": "linear", "bias": True, "inner": 3}
    return parts


def trains(part):
    return part["kind"] != "quant" and not {"frozen", "late", "unused", "tie", "share"} & part.keys()


def optimizer_of(dice):
    return {"kind": dice.one([kind for kind in ("adamw", "adamw", "adamw", "sgd", "amsgrad", "tensor_lr")
                              if not switches.is_off(dice.program, kind)]),
            "groups": dice.number(1, 3), "salt": dice.number(0, 99), "named": dice.may("named", 0.7)}


def deepspeed_layout(dice):
    stage = dice.number(0, 3)
    return {"zero": stage, "ranks": dice.number(1, 3), "round_robin": stage in (1, 2) and dice.may("round_robin", 0.3),
            "sub_group": dice.one((None, None, 20, 50)) if stage == 3 else None}


def deepspeed_model(dice):
    """A DeepSpeed checkpoint goes to other stages and numbers of ranks, to DeepSpeed's universal folders, and to
    torch."""
    dtype = dice.one([kind for kind in ("fp32", "fp32", "fp32", "bf16", "fp16") if not switches.is_off("deepspeed", kind)])
    run = deepspeed_layout(dice) | {"dtype": dtype, "schedule": dice.may("schedule", 0.4), "excluded": dice.may("excluded", 0.2)}
    if dtype == "bf16" and run["zero"] == 1:
        run["fp32_gradients"] = dice.may("fp32_gradients", 0.5)
    targets = [{"to": "deepspeed", **deepspeed_layout(dice)}]
    if dice.may("atoms", 0.3):
        targets[0]["by"] = "atoms"
    more = dice.one(("deepspeed", "universal", "dcp", "safetensors", "dcp"))
    if more == "deepspeed":
        targets.append({"to": "deepspeed", **deepspeed_layout(dice)})
    elif more == "universal":
        # DeepSpeed's universal loader heeds neither the order of round_robin_gradients nor stage 0.
        layout = deepspeed_layout(dice)
        targets.append({"to": "universal", **layout, "zero": max(1, layout["zero"]), "round_robin": False})
    elif more == "dcp":
        targets.append({"to": "dcp", **torch_layout(dice)})
    else:
        targets.append({"to": "safetensors", "only": dice.one(("weight", "master"))})
    return run, [target for target in targets if not switches.is_off("deepspeed", f"to {target['to']}")]


def torch_layout(dice):
    engine = dice.one(("fsdp2", "fsdp2", "fsdp2", "hsdp", "ddp", "plain"))
    ranks = {"plain": 1, "hsdp": 2, "ddp": 2}.get(engine) or dice.number(1, 3)
    return {"engine": engine, "ranks": ranks, "units": dice.may("units", 0.6)}


def torch_model(dice):
    """A torch.distributed.checkpoint folder goes to other meshes, and to DeepSpeed."""
    run = torch_layout(dice) | {"optim": dice.one(("nested", "nested", "flat"))}
    targets = [{"to": "dcp", **torch_layout(dice)}]
    more = dice.one(("deepspeed", "deepspeed", "dcp", "safetensors"))
    if more == "deepspeed":
        targets.append({"to": "deepspeed", **deepspeed_layout(dice)})
    elif more == "dcp":
        targets.append({"to": "dcp", **torch_layout(dice)})
    else:
        targets.append({"to": "safetensors", "only": "weight"})
    return run, [target for target in targets if not switches.is_off("torch", f"to {target['to']}")]


# Ranks of tensor, pipeline, expert and data parallelism; two ranks at most.
MESHES = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 2, 2))


def megatron_layout(dice, model):
    def fits(mesh):
        tp, pp, ep, _ = mesh
        if model["tied"] and pp > 1 and switches.is_off("megatron", "tied stages"):
            return False
        # Megatron trains experts with tensor parallelism only together with sequence parallelism.
        return not (tp > 1 and model["experts"] or ep > 1 and not model["experts"])

    tp, pp, ep, dp = dice.one([mesh for mesh in MESHES if fits(mesh)])
    return {"tp": tp, "pp": pp, "ep": ep, "dp": dp, "optimizer": dice.one(("none", "fully_reshardable", "dp_reshardable"))}


def megatron_model(dice):
    model = {"layers": dice.one((2, 4)), "heads": 4, "kv_heads": dice.one((2, 4)), "hidden": dice.one((12, 20)),
             "inner": dice.one((10, 14)), "vocabulary": dice.one((36, 38)), "tied": dice.may("tied", 0.4),
             "gated": dice.may("gated", 0.7), "bias": dice.may("bias", 0.3), "norm": dice.one(("RMSNorm", "LayerNorm")),
             "experts": 4 if dice.may("experts", 0.3) else 0, "bf16": dice.may("bf16", 0.5)}
    model["seed"] = 7
    if model["experts"]:
        model["bias"] = False  # Megatron cannot train one on the CPU
    return model, megatron_layout(dice, model), [{"to": "megatron", **megatron_layout(dice, model)} for _ in range(2)]


def fit_targets(program, parts, run, targets):
    """Takes away parts that a trainer cannot train or load, with any converter."""
    if parts[0]["kind"] == "quant" and any(layout.get("zero") == 3 for layout in (run, *targets)):
        parts[0]["kind"] = "linear"  # DeepSpeed's stage 3 takes the type of the first parameter, which must not be an integer
    to = {target["to"] for target in targets}
    for part in parts:
        if program == "deepspeed" and "dcp" in to and part["kind"] == "quant":
            part["kind"] = "linear"  # PyTorch's get_state_dict wants every key to be the path of an attribute
        if program == "torch" and "deepspeed" in to and part.get("extra") in ("dict", "bytes", "none"):
            del part["extra"]  # DeepSpeed formats cannot store foreign pickles, as the command reports
    for target in targets:
        # DCP files and those of stages 0 and 1 do not record late frozen parameters, which DeepSpeed looks up where stages 2 and
        # 3 list others (docs/formats/deepspeed.md).
        if target["to"] == "deepspeed" and any("late" in part for part in parts):
            if program == "torch" and target["zero"] == 3:
                target.update(zero=2, sub_group=None)
            elif program == "deepspeed" and run["zero"] < 2 <= target["zero"]:
                target.update(zero=1, sub_group=None)


def fit_universal_loader(parts, optimizer, run, targets):
    """DeepSpeed's universal loader of stage 3 gives all groups the hyper-parameters of the first, and all parameters the step of the
    first (the command warns), and wants the states of Adam."""
    for target in targets:
        if target["to"] != "universal" or target["zero"] != 3:
            continue
        if optimizer["kind"] == "sgd" or (run["zero"] == 0 and any("late" in part for part in parts)):
            target.update(zero=2, sub_group=None)
        else:
            optimizer["groups"] = 1


def draw(seed, program=None):
    """The description of the model of a seed."""
    program = program or TURNS[seed % len(TURNS)]
    dice = Dice(program, seed)
    if program == "megatron":
        model, run, targets = megatron_model(dice)
        return {"program": program, "seed": seed, "model": model, "run": run, "targets": targets}
    run, targets = (deepspeed_model if program == "deepspeed" else torch_model)(dice)
    parts = parts_of(dice)
    if any("strided" in part for part in parts):  # several ranks reject such parameters in every trainer
        for layout in (run, *targets):
            layout.update({key: value for key, value in {"ranks": 1, "engine": "plain"}.items() if key in layout})
    if any("late" in part for part in parts) and run.get("excluded"):
        run["excluded"] = not switches.is_off(program, "excluded late")
    optimizer = optimizer_of(dice)
    fit_universal_loader(parts, optimizer, run, targets)
    numbered = any(target["to"] == "deepspeed" for target in targets)
    if run.get("optim") == "flat" and numbered and switches.is_off(program, "flat groups"):
        optimizer["groups"] = 1
    fit_targets(program, parts, run, targets)
    return {"program": program, "seed": seed, "width": dice.number(3, 7), "parts": parts, "optimizer": optimizer, "run": run,
            "targets": targets}
