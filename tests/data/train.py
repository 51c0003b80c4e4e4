#!/usr/bin/env python3
"""Makes the checkpoints in tests/data with real DeepSpeed on CPU ranks.

    train.py FOLDER [NAME...]     makes FOLDER/NAME for the named cases, for all of this release without names

`demo` is tests/data/demo; all others lie in tests/data/deepspeed. Each of those is a folder: `ckpt`, as
DeepSpeed saved it, and `expected.safetensors`, every logical tensor that the trainer held at that
moment: NAME/fp32, NAME/exp_avg and the other states of the optimizer, NAME/computed (the weight it
computes with, where that is not NAME/fp32), NAME/frozen, NAME/buffer, and NAME/alias_of with the name
of the parameter that NAME is tied to. They are read from the memory of the ranks, never from the files.
A series has a checkpoint and an `expected_STEP.safetensors` for each of its steps. `tokens.jsonl` has
the tokens that the experts got, by layer. `universal_` cases are what DeepSpeed's own converter makes
of another case.

Run it with the Python of the release that a case names; all others are of the release that
scripts/peers installs. The models are those of tests/interop/deepspeed, as small as they can be.
"""

import functools
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "interop" / "deepspeed"))

import ranks  # first: it sets up the environment that the next ones need
import deepspeed
import torch
import torch.distributed as dist

import demo_model
import train
from model import complete, make_engine, train_step
from tensors import logical_tensors

# Nothing divides evenly: 13 tokens, layers of 8 and 17.
SMALL = {"width": 8, "vocab": 13, "batch": 24}
EXPERTS = {"experts": 4, "ep": 2}
# name: (ranks, case of tests/interop/deepspeed/model.py)
CASES = {
    "zero0_w1_fp32": (1, {"zero": 0}),
    "zero0_w2_bf16": (2, {"zero": 0, "dtype": "bf16"}),
    "zero1_w2": (2, {"zero": 1}),
    "zero1_w2_sgd": (2, {"zero": 1, "optimizer": "sgd"}),
    "zero2_w4_three_groups": (4, {"zero": 2, "groups": 3}),
    "zero2_w3_frozen_tied": (3, {"zero": 2, "groups": 1, "frozen": True, "tied": True}),
    "zero2_w2_left_out": (2, {"zero": 2, "groups": 1, "frozen": True, "left_out": True}),
    "zero2_w2_round_robin": (2, {"zero": 2, "groups": 1, "round_robin": True}),
    "bf16_zero2_w2": (2, {"zero": 2, "dtype": "bf16"}),
    "fp16_zero2_w2": (2, {"zero": 2, "dtype": "fp16"}),
    "bf16opt_w4": (4, {"zero": 1, "dtype": "bf16", "grad_accum": "fp32"}),
    "zero3_w2_sub_groups": (2, {"zero": 3, "sub_group": 300}),
    "zero3_w4_frozen": (4, {"zero": 3, "groups": 1, "frozen": True}),
    "bf16_zero3_w3": (3, {"zero": 3, "dtype": "bf16"}),
    "moe4_ep2_zero1_w2": (2, {"zero": 1} | EXPERTS),
    "moe4_ep2_zero2_w4": (4, {"zero": 2, "dtype": "bf16", "layers": 1} | EXPERTS),
    "pp2_dp2_zero1": (4, {"zero": 1, "pp": 2}),
    "autotp2_dp2_zero1": (4, {"zero": 1, "groups": 1, "tp": 2}),
}
SERIES = {"moe4_ep2_series": (2, {"zero": 2, "layers": 1, "width": 4} | EXPERTS)}
UNIVERSAL = {
    "universal_zero2_w2": (2, {"zero": 2, "layers": 1}),
    "universal_bf16_zero3_w2": (2, {"zero": 3, "dtype": "bf16", "layers": 1, "groups": 1, "frozen": True}),
    "universal_autotp2": (2, {"zero": 1, "groups": 1, "tp": 2, "layers": 1}),
}
RELEASES = {
    "0.12.6_moe4_ep2_zero1_w2": (2, {"zero": 1} | EXPERTS),
    "0.12.6_bf16_zero2_w3": (3, {"zero": 2, "dtype": "bf16", "groups": 1, "frozen": True, "tied": True}),
    "0.14.5_moe4_ep2_zero2_w4": (4, {"zero": 2, "layers": 1} | EXPERTS),
    "0.14.5_zero3_w2": (2, {"zero": 3}),
    "0.16.9_moe4_ep2_zero1_w2": (2, {"zero": 1} | EXPERTS),
    "0.16.9_bf16opt_w2": (2, {"zero": 1, "dtype": "bf16", "grad_accum": "fp32"}),
    "0.18.9_autotp2_dp2_zero1": (4, {"zero": 1, "groups": 1, "tp": 2}),
}
# Only the tokens that its experts get, not one checkpoint.
ROUTING = {"routing_12x32": (1, {"zero": 1, "layers": 12, "experts": 32, "batch": 16})}
ROUTING_STEPS, ROUTING_EVERY = 150, 5
SERIES_LENGTH = 3
DTYPES = {torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64"}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        place = [len(data), len(data) + len(bits)]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += bits
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tied_names(module):
    """Names of parameters beyond their first one: {name: first name}."""
    first, tied = {}, {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    return tied


def remember(engine, case, path):
    """Collective. Writes down what the ranks hold."""
    tensors = logical_tensors(engine, case)
    for name in [name for name in tensors if name.endswith("/computed")]:
        master = tensors.get(name.removesuffix("computed") + "fp32")
        if master is not None and torch.equal(tensors[name], master):
            del tensors[name]
    for name, of in tied_names(engine.module).items():
        tensors[f"{name}/alias_of"] = torch.tensor(list(of.encode()), dtype=torch.uint8)
    if dist.get_rank() == 0:
        write_safetensors(path, tensors)


def count_tokens(engine, counts):
    """Collects the tokens that each expert gets in a step: counts[layer] grows with every forward."""
    from deepspeed.moe.sharded_moe import MOELayer
    layers = [module for module in engine.module.modules() if isinstance(module, MOELayer)]
    for index, layer in enumerate(layers):
        counts.append(0)

        def note(module, _inputs, _output, index=index):
            counts[index] = counts[index] + module.exp_counts.detach().clone().long()
        layer.register_forward_hook(note)


def make(folder, case, steps):
    """Collective. Trains, and saves after each of these steps."""
    engine = make_engine(case)
    counts, tokens = [], []
    if len(steps) > 1:
        count_tokens(engine, counts)
    for step in range(1, max(steps) + 1):
        counts[:] = [0] * len(counts)
        train_step(engine, case, step)
        for layer in counts:
            dist.all_reduce(layer)
        tokens.append({"iteration": step, "tokens": [layer.tolist() for layer in counts]})
        if step in steps:
            train.save(engine, folder / "ckpt", case["left_out"])
            suffix = f"_{step}" if len(steps) > 1 else ""
            remember(engine, case, folder / f"expected{suffix}.safetensors")
    if counts and dist.get_rank() == 0:
        (folder / "tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tokens))


def route(folder, case):
    """Collective. Trains and notes every few steps how many tokens each expert has got since the last note."""
    engine = make_engine(case)
    counts, lines = [], []
    count_tokens(engine, counts)
    for step in range(1, ROUTING_STEPS + 1):
        train_step(engine, case, step)
        if step % ROUTING_EVERY == 0:
            line = {"iteration": step, "tokens": [layer.tolist() for layer in counts]}
            lines.append(json.dumps(line, separators=(",", ":")))
            counts[:] = [0] * len(counts)
    (folder / "tokens.jsonl").write_text("\n".join(lines) + "\n")


def make_routing(folder, world, case):
    folder.mkdir(parents=True, exist_ok=True)
    ranks.run(world, route, folder, complete(SMALL | case), seconds=900)


def make_case(folder, world, case, steps=(train.STEPS,)):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks.run(world, make, folder, complete(SMALL | case), steps)
    remove_programs(folder)


def remove_programs(folder):
    """DeepSpeed copies programs of its own into every checkpoint."""
    for program in folder.rglob("*.py"):
        program.unlink()


def make_demo(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks.run(2, demo_model.make, folder)
    remove_programs(folder)


def make_universal(folder, world, case):
    make_case(folder, world, case)
    source, target = folder / "native", folder / "ckpt"
    (folder / "ckpt").rename(source)
    tag = (source / "latest").read_text()
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--no_strict",
                    "--num_extract_workers", "1", "--num_merge_workers", "1", "--input_folder", source / tag,
                    "--output_folder", target / f"{tag}_universal"],
                   check=True, env=os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"})
    shutil.rmtree(source)
    (target / "latest_universal").write_text(f"{tag}_universal")


def makers():
    """What this release of DeepSpeed makes: {name: function of a folder}."""
    release = deepspeed.__version__.split("+")[0]
    older = {name: how for name, how in RELEASES.items() if name.startswith(release)}
    if older:
        return {name: functools.partial(with_folder, make_case, how) for name, how in older.items()}
    steps = tuple(range(train.STEPS, train.STEPS + SERIES_LENGTH))
    made = {"demo": make_demo}
    for maker, table in ((make_case, CASES), (make_routing, ROUTING), (make_universal, UNIVERSAL)):
        made |= {name: functools.partial(with_folder, maker, how) for name, how in table.items()}
    return made | {name: functools.partial(with_folder, make_case, (*how, steps)) for name, how in SERIES.items()}


def with_folder(maker, how, folder):
    maker(folder, *how)


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: train.py FOLDER [NAME...]")
    known = makers()
    for name in sys.argv[2:] or known:
        if name not in known:
            sys.exit(f"train.py: {name}: DeepSpeed {deepspeed.__version__} makes {', '.join(known)}")
        known[name](pathlib.Path(sys.argv[1]).resolve() / name)
        print(name, flush=True)


if __name__ == "__main__":
    main()
