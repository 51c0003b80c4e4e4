# SPDX-License-Identifier: Apache-2.0
"""Makes tests/unit/partial/optimizer_steps/vectors.jsonl, steps as torch makes them: make_vectors.py > vectors.jsonl

A line is a run of an optimizer: options and gradients of each step, and the parameter and states before and after
each, as the bits of float32 in hexadecimal. Elements are kept if torch rounds their square roots correctly, so that
the vectors are the same wherever they are made.
"""

import json
import os
import subprocess
import sys

import numpy
import torch
from replay_test import STATES, optimizer_of, set_options

ELEMS, KEPT, STEPS = 200, 6, 4
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
RUNS = [
    ("AdamW", ADAM, {"lr": 3e-4}),
    ("AdamW", ADAM | {"amsgrad": 1, "maximize": 1}, {"beta2": 0.95}),
    ("AdamW", ADAM | {"beta1": 0.3, "weight_decay": 0.0}, {"eps": 1e-6}),
    ("Adam", ADAM, {"weight_decay": 0.1}),
    ("Adam", ADAM | {"amsgrad": 1}, {"weight_decay": 0.0}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.0, "dampening": 0.0}, {"lr": 0.01}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.1}, {"momentum": 0.8}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": 1}, {"lr": 0.3}),
    ("Adagrad", {"lr": 0.01, "weight_decay": 0.1, "lr_decay": 0.01, "eps": 1e-10}, {"lr": 0.02}),
    ("Lion", {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}, {"beta1": 0.95}),
]


def hexadecimal(tensor):
    return [f"{bits:08x}" for bits in tensor.detach().numpy().view(numpy.uint32)]


def root_is_correct(tensor):
    return tensor.sqrt().numpy() == numpy.sqrt(tensor.numpy())


def make_run(name, options, later, numbers):
    states = list(STATES[name]) + (["max_exp_avg_sq"] if options.get("amsgrad") else [])
    if name == "SGD" and options["momentum"] == 0:
        states = []
    param = torch.from_numpy(numbers.standard_normal(ELEMS).astype(numpy.float32))
    optimizer = optimizer_of(name, param, {key: bool(v) if key in ("amsgrad", "nesterov") else v
                                           for key, v in options.items()})
    if name == "SGD":
        optimizer.state[param] = {"momentum_buffer": None}
    else:
        optimizer.state[param] = {state: torch.zeros(ELEMS) for state in states} | {"step": torch.tensor(0.0)}
    kept = numpy.ones(ELEMS, bool)
    snapshots, steps = [[param.clone()] + [torch.zeros(ELEMS) for _ in states]], []
    for index in range(STEPS):
        options = options | (later if index >= 2 else {})
        set_options(optimizer, options)
        factor = [1.0, 1 / 65536, 0.37, 1.0][index]
        gradient = torch.from_numpy((numbers.standard_normal(ELEMS) / factor).astype(numpy.float32)).bfloat16()
        param.grad = gradient.float().mul_(factor) if factor != 1 else gradient.float()
        optimizer.step()
        held = [param] + [optimizer.state[param][state] for state in states]
        snapshots.append([tensor.clone() for tensor in held])
        for state, tensor in zip(states, held[1:]):
            if state in ("exp_avg_sq", "max_exp_avg_sq", "sum"):
                kept &= root_is_correct(tensor)
        steps.append({"options": options, "count": index + 1, "gradient_factor": factor, "gradient": gradient})
    at = numpy.flatnonzero(kept)[:KEPT]
    for step in steps:
        bits = step["gradient"].view(torch.int16).numpy().view(numpy.uint16)[at]
        step["gradient"] = [f"{value:04x}" for value in bits]
    run = {"optimizer": name, "separate": torch.backends.cpu.get_cpu_capability() == "DEFAULT", "steps": steps,
           "snapshots": [[hexadecimal(tensor[at]) for tensor in snapshot] for snapshot in snapshots]}
    print(json.dumps(run), flush=True)


def main():
    if "ATEN_CPU_CAPABILITY" not in os.environ:
        for capability in ("default", "avx2"):
            subprocess.run([sys.executable, __file__], env=os.environ | {"ATEN_CPU_CAPABILITY": capability}, check=True)
        return
    numbers = numpy.random.default_rng(7)
    for name, options, later in RUNS:
        make_run(name, options, later, numbers)


if __name__ == "__main__":
    main()
