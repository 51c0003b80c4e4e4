# SPDX-License-Identifier: Apache-2.0
"""Features that no model has yet, refusals that are right, and differences that are right, each with its reason."""

import os
import re

# Program (or "*"), feature as draw.py names it, and why no model has it.
OFF = (
    ("megatron", "tied stages", "Megatron's own resume of tied embeddings in two stages saves other states than it has loaded"),
    ("torch", "flat groups", "a flat optimizer does not record the order of its groups, by which DeepSpeed numbers them: the command warns"),
)

# Target format, exit code, pattern of the message, and why the refusal is right.
REFUSALS = (
    ("*", 9, "does not record which optimizer state belongs to which parameter",
     "stage 0 has neither names nor an order where groups have parameters of one shape (docs/formats/deepspeed.md)"),
    ("deepspeed", 9, "have different numbers of steps, but they share a flat group", "a flat group has one step (docs/formats/deepspeed.md)"),
    ("dcp", 5, r"(?m)^iteration: \d+ and \d+$[^\n]*\n\d+ tensors equal, 1 difference,",
     "without ZeRO DeepSpeed's 16-bit optimizers count one step more than the engine, and DCP records steps alone"),
    ("*", 9, r'optimizer: parameter "[^"]+" is not in module',
     "at stage 0 without frozen parameters, a late frozen one leaves the module but not the optimizer (docs/formats/deepspeed.md)"),
    ("deepspeed", 9, "round_robin=true: with zero=1, bf16 weights and gradients in float32",
     "DeepSpeed's BF16_Optimizer ignores the order that round_robin_gradients asks for (docs/formats/deepspeed.md)"),
    ("megatron", 9, "dp_reshardable: .* is float32", "Megatron cannot load buckets of float32 parameters (docs/formats/megatron.md)"),
)

# Target format, pattern of the trainer's error, and why it is the trainer's own.
CANNOT = (
    ("universal", "IndexError: list index out of range",
     "DeepSpeed's universal loader wants a parameter of every group on every rank"),
    ("universal", r"AssertionError: Steps \[.*\] are not equal", "DeepSpeed's universal loader wants one step in a group"),
    ("universal", "KeyError: 'max_exp_avg_sq'", "DeepSpeed's universal loader of stage 3 loads the states of plain Adam only"),
)

# Source program, target format, pattern of a difference, and why it is right.
ACCEPTED = (
    ("torch", "deepspeed", r"^/groups/\d+/bias_correction: extra", "DeepSpeed's optimizers ask for it, PyTorch's have no such switch"),
    ("deepspeed", "dcp", r"_extra_state", "extra states that are not tensors go to DeepSpeed's own formats (docs/formats/deepspeed.md)"),
    ("deepspeed", "dcp", r"\.initial_lr: extra in the checkpoint", "PyTorch's schedulers ask for it"),
)


def debug():
    return bool(os.environ.get("SHARDWRIGHT_TEST_DEBUG"))


def is_off(program, feature):
    return any(feature == off and of in ("*", program) for of, off, _ in OFF)


def resumes_itself(case):
    """True if Megatron can load its own checkpoint: it cannot copy into buckets of float32 parameters
    (docs/formats/megatron.md). Otherwise the control is the run that continues."""
    return case["run"]["optimizer"] != "dp_reshardable" or case["model"]["bf16"]


def check_is_off(case, target):
    """True if --check finds a difference that trainers do not: PyTorch has no states of a parameter that never had a
    gradient, and DeepSpeed's flat groups have zeros."""
    return case["program"] == "torch" and target["to"] == "deepspeed" and any(part.get("unused") for part in case["parts"])


def refusal(case, target, code, said):
    """Why a refusal is right; None if it is not."""
    for to, expected, pattern, reason in REFUSALS:
        if to in ("*", target["to"]) and code == expected and re.search(pattern, said):
            return reason
    return None


def trainer_cannot(target, said):
    """Why a trainer fails by itself; None if it does not."""
    return next((reason for to, pattern, reason in CANNOT if to == target["to"] and re.search(pattern, said)), None)


def accepted(case, target, line):
    return any(of in ("*", case["program"]) and to in ("*", target["to"]) and re.search(pattern, line)
               for of, to, pattern, _ in ACCEPTED)


def comparable_losses(case, target, losses):
    """Number of the next losses that must be those of the control."""
    if target["to"] == "universal" and any({"frozen", "buffers", "extra"} & part.keys() or part["kind"] == "quant" for part in case["parts"]):
        return 0  # DeepSpeed's universal loader leaves these as they are
    if case["program"] != target["to"] == "dcp" and any(part.get("extra") in ("dict", "bytes") for part in case["parts"]):
        return 0  # they are left out
    # Without ZeRO, and in PyTorch, a parameter without a gradient rests. With ZeRO its moments and weight decay still move it. The
    # first loss is that of the weights that were loaded.
    if any(part.get("late") for part in case.get("parts", ())) and (case["run"].get("zero", 0) > 0) != (target.get("zero", 0) > 0):
        return 1
    # PyTorch has the learning rate of the checkpoint, and no schedule.
    return 2 if target["to"] == "dcp" and case["run"].get("schedule") else losses
