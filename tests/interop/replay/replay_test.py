# SPDX-License-Identifier: Apache-2.0
"""Steps of torch's optimizers and of lib/partial/optimizer_steps give the same bits: replay_test.py PROBE [SEED]

Random cases for each optimizer, 10,000 steps or more, with options that change between steps, gradients in
three types, extreme values, and ranges cut and shared among threads at random. torch runs once for each set of
instructions that its kernels are compiled for. A NaN has to be a NaN; its sign and payload are not compared.
Nor is the sign of zeros of Adam where beta1 is 0.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy
import torch

CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}
STEPS = 10_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATES = {
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "Adam": ["exp_avg", "exp_avg_sq"],
    "SGD": ["momentum_buffer"],
    "Adagrad": ["sum"],
    "Lion": ["exp_avg"],
}


class Lion(torch.optim.Optimizer):
    """The formula of Lion's authors (google/automl, lion/lion_pytorch.py)."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m, (beta1, beta2) = self.state[p]["exp_avg"], group["betas"]
                update = m * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def beta(rng):
    return rng.choice([0.0, 0.5, 0.49999999, 0.9, 0.95, 0.98, 0.999, 0.9999999, 1 - 2**-53, rng.random()])


def options_of(name, rng, fixed):
    """Options of one step; `fixed` are those that do not change within a run."""
    lr = rng.choice([0.0, 1e-5, 3e-4, 1e-3, 0.1, 1.0, 7.5e10, 1e-45, 10 ** rng.uniform(-8, 0)])
    options = {"lr": lr, "weight_decay": rng.choice([0.0, 0.0, 0.01, 0.1, 3.0, rng.random() * 1e-3])}
    if name in ("AdamW", "Adam", "Lion"):
        options |= {"beta1": beta(rng), "beta2": beta(rng)}
    if name in ("AdamW", "Adam", "Adagrad"):
        options["eps"] = rng.choice([1e-8, 1e-8, 1e-6, 1e-15, 0.0, 1.0, 1e-40])
    if name == "Adagrad":
        options["lr_decay"] = rng.choice([0.0, 0.01, 1e-5, 2.0])
    if name == "SGD":
        momentum = rng.choice([0.9, 0.5, 0.99, rng.random() + 0.001]) if fixed["momentum"] else 0.0
        dampening = 0.0 if fixed["nesterov"] else rng.choice([0.0, 0.1, 0.9, 1.0, rng.random()])
        options |= {"momentum": momentum, "dampening": dampening}
    return options | {key: value for key, value in fixed.items() if key != "momentum"}


def fixed_of(name, rng):
    if name in ("AdamW", "Adam"):
        fixed = {"amsgrad": rng.random() < 0.3, "maximize": rng.random() < 0.3}
        if rng.random() < 0.3:
            fixed["decoupled_weight_decay"] = name == "AdamW"
        return fixed
    if name == "SGD":
        momentum = rng.random() < 0.8
        return {"momentum": momentum, "nesterov": momentum and rng.random() < 0.4, "maximize": rng.random() < 0.3}
    return {"maximize": rng.random() < 0.3} if name == "Adagrad" else {}


def values(count, rng, numbers, extreme):
    """float32 of many sizes; with `extreme` also denormals, the largest, infinities and NaN."""
    size = 10.0 ** rng.choice([-30, -8, -3, 0, 0, 0, 3, 15])
    out = (numbers.standard_normal(count) * size).astype(numpy.float32)
    if extreme:
        out *= (10.0 ** numbers.uniform(-9, 9, count)).astype(numpy.float32)
        special = [0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 3.4028235e38, -3.4028235e38]
        special += [numpy.inf, -numpy.inf, numpy.nan] if rng.random() < 0.5 else []
        at = numbers.random(count) < 0.2
        out[at] = numbers.choice(numpy.array(special, numpy.float32), at.sum())
    return out


def optimizer_of(name, param, options):
    given = {key: value for key, value in options.items() if key not in ("beta1", "beta2", "decoupled_weight_decay")}
    if name in ("AdamW", "Adam", "Lion"):
        given["betas"] = (options["beta1"], options["beta2"])
    if name == "Lion":
        return Lion([param], **given)
    return getattr(torch.optim, name)([param], foreach=False, fused=False, **given)


def set_options(optimizer, options):
    group = optimizer.param_groups[0]
    for key, value in options.items():
        if key in ("beta1", "beta2"):
            continue
        group[key] = value
    if "beta1" in options:
        group["betas"] = (options["beta1"], options["beta2"])


def square_roots(folder):
    """Writes torch's square roots of [1, 4). Returns arguments for the probe, and the number of all square roots that
    come out wrong.

    All others follow from those of [1, 4) by significand and the exponent's last bit, up to a number that is found
    here. Subnormal numbers follow too, or are rounded correctly: that depends on the processor.
    """
    one, end = 0x3F800000, 0x7F800000

    def roots(bits):
        found = torch.sqrt(torch.from_numpy(bits.view(numpy.float32)))
        return found.numpy().view(numpy.int32), numpy.sqrt(bits.view(numpy.float32)).view(numpy.int32)

    found, correct = roots(numpy.arange(one, one + 2**24, dtype=numpy.uint32))
    found.tofile(folder / "roots")
    off = numpy.roll(found - correct, one % 2**24)
    last, wrong, follow = end - 1, 0, 0
    for start in range(0, end, 2**24):
        bits = numpy.arange(start, min(start + 2**24, end), dtype=numpy.uint32)
        found, correct = roots(bits)
        told = correct + off[: bits.size]
        if start == 0:
            small = bits < 0x00800000
            scaled = (bits[small].view(numpy.float32) * numpy.float32(2.0**64)).view(numpy.uint32)
            scaled_off = numpy.where(bits[small] == 0, 0, off[scaled % 2**24])
            follow = int((found[small] != correct[small]).any())
            told[small] = correct[small] + follow * scaled_off
        if bits[-1] == end - 1 and (found != told).any():
            last = int(bits[numpy.argmax(found != told)]) - 1
            told = numpy.where(bits > last, correct, told)
        wrong += int((found != told).sum())
    print(f"square roots: {numpy.count_nonzero(off)} of {2**24} are not rounded correctly, up to {last:#x}, "
          f"{'with' if follow else 'without'} subnormal numbers; "
          f"{wrong} of {end} are told wrong", flush=True)
    return [folder / "roots", str(last | follow << 31)], wrong


def cuts_of(count, rng):
    return sorted({0, count, *(rng.randrange(count + 1) for _ in range(rng.choice([0, 1, 3, 9])))})


def make_case(name, rng, numbers, out, separate):
    """Writes a case to `out`; returns what torch made of it, array by array, and the number of steps."""
    elems = rng.choice([1, 7, 15, 16, 33, 64, 100, 257, 1000]) if rng.random() < 0.98 else rng.choice([70001, 131072])
    extreme = rng.random() < 0.5
    dtype = rng.choice(["float32", "float32", "bfloat16", "float16"])
    fixed = fixed_of(name, rng)
    names = list(STATES[name]) + (["max_exp_avg_sq"] if fixed.get("amsgrad") else [])
    if name == "SGD" and not fixed["momentum"]:
        names = []
    count = rng.choice([0, 0, 1, 7, 1000, 123456, 2**24 - 3]) if name in ("AdamW", "Adam", "Adagrad") else 0
    fresh = count == 0
    param = torch.from_numpy(values(elems, rng, numbers, extreme))
    start = [numpy.zeros(elems, numpy.float32) for _ in range(3)]
    if not fresh or (name != "SGD" and rng.random() < 0.5):
        for i, state in enumerate(names):
            start[i] = values(elems, rng, numbers, extreme)
            if state in ("exp_avg_sq", "max_exp_avg_sq", "sum"):
                start[i] = numpy.abs(start[i])
    states = [torch.from_numpy(array.copy()) for array in start]
    before = param.numpy().copy()

    steps, gradients, results = [], [], []
    optimizer, first = None, name == "SGD"
    options = options_of(name, rng, fixed)
    for _ in range(20 if elems < 10_000 else 3):
        if rng.random() < 0.3:
            options = options_of(name, rng, fixed)
        gradient = torch.from_numpy(values(elems, rng, numbers, extreme)).to(DTYPES[dtype])
        factor = rng.choice([1.0, 1.0, 1 / 65536, 1 / (65536 * 1.37), 0.1])
        skipped = rng.random() < 0.05
        if optimizer is None:
            optimizer = optimizer_of(name, param, options)
            if name == "SGD":
                optimizer.state[param] = {"momentum_buffer": None}
            else:
                optimizer.state[param] = {state: states[i] for i, state in enumerate(names)}
                optimizer.state[param]["step"] = torch.tensor(float(count))
        if not skipped:
            set_options(optimizer, options)
            param.grad = gradient.float().clone()
            if factor != 1.0:
                param.grad.mul_(factor)
            optimizer.step()
        kept = optimizer.state[param]
        if name in ("AdamW", "Adam", "Adagrad"):
            count = kept["step"].item()
        steps.append(
            {"options": {key: float(value) for key, value in options.items()}, "count": count,
             "gradient_factor": factor, "skipped": skipped, "first_momentum": first}
        )
        first = first and skipped
        gradients.append(gradient.view(torch.uint8).numpy().tobytes())
        results.append(param.numpy().copy())
        for i in range(3):
            held = kept.get(names[i]) if i < len(names) else None
            results.append((states[i] if held is None else held).numpy().copy())
    case = {"optimizer": name, "elems": elems, "gradient_dtype": dtype, "separate": separate, "steps": steps,
            "threads": rng.choice([1, 2, 3, 4]), "cuts": cuts_of(elems, rng), "unaligned": rng.random() < 0.3}
    out.write(json.dumps(case).encode() + b"\n" + before.tobytes() + b"".join(array.tobytes() for array in start))
    for gradient in gradients:
        out.write(gradient)
    return case, results


def differs(found, expected, any_zero):
    same = numpy.isnan(found) & numpy.isnan(expected)
    if any_zero:
        same |= (found == 0) & (expected == 0)
    return (found.view(numpy.uint32) != expected.view(numpy.uint32)) & ~same


def check(cases, results):
    """The error in the probe's results, or None."""
    for case, expected in cases:
        # lerp_ with a weight of 1 gives zeros another sign in the last elements, which fill no vector.
        adam = case["optimizer"] in ("AdamW", "Adam")
        any_zero = adam and any(step["options"]["beta1"] < 2**-25 for step in case["steps"])
        for index, wanted in enumerate(expected):
            found = numpy.frombuffer(results.read(4 * case["elems"]), numpy.float32)
            if found.size != wanted.size:
                return "results end early"
            wrong = differs(found, wanted, any_zero)
            if wrong.any():
                at, step = int(numpy.argmax(wrong)), case["steps"][index // 4]
                what = "param" if index % 4 == 0 else f"state {index % 4 - 1}"
                return (
                    f"{case['optimizer']} step {index // 4} of {case['elems']} elements ({wrong.sum()} wrong): "
                    f"{what}[{at}] {found[at].item().hex()}, torch has {wanted[at].item().hex()}; {step}"
                )
    return "results go on" if results.read(1) else None


def run(probe, roots, name, seed, separate, folder):
    rng, numbers = random.Random(f"{name} {seed}"), numpy.random.default_rng(seed)
    made, wrong = 0, None
    while made < STEPS and wrong is None:
        cases = []
        with open(folder / "cases", "wb") as out:
            for _ in range(100):
                cases.append(make_case(name, rng, numbers, out, separate))
                made += len(cases[-1][0]["steps"])
        subprocess.run([probe, folder / "cases", folder / "results", *roots], check=True)
        with open(folder / "results", "rb") as results:
            wrong = check(cases, results)
    print(f"{torch.backends.cpu.get_cpu_capability()} {name}: {made} steps, {wrong or 'all bits equal'}", flush=True)
    return wrong is None


def refuses(probe, roots, folder):
    """Options that are unknown or choose other kernels are refused by name."""
    step = {"count": 1, "gradient_factor": 1, "skipped": False, "first_momentum": False}
    adam = {"lr": 1, "beta1": 0.9, "beta2": 0.9, "eps": 0, "weight_decay": 0}
    good = True
    for name, options, code, word in [
        ("AdamW", adam | {"fused": 1}, 9, '"fused"'),
        ("AdamW", adam | {"foreach": 1}, 9, '"foreach"'),
        ("AdamW", adam | {"momentum": 0.9}, 9, '"momentum"'),
        ("Adam", {key: adam[key] for key in adam if key != "eps"}, 4, '"eps"'),
        ("RMSprop", {"lr": 1}, 9, '"RMSprop"'),
    ]:
        case = {"optimizer": name, "elems": 0, "gradient_dtype": "float32", "separate": False, "threads": 1,
                "cuts": [0, 0], "unaligned": False, "steps": [step | {"options": options}]}
        (folder / "cases").write_text(json.dumps(case) + "\n")
        done = subprocess.run([probe, folder / "cases", folder / "results", *roots], capture_output=True, text=True)
        if done.returncode != code or word not in done.stderr:
            print(f"{name} {options}: exit code {code} and {word} expected, found {done.returncode}: {done.stderr}")
            good = False
    return good


def main():
    probe, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    if capability is None:  # one process for each set of instructions
        best = torch.backends.cpu.get_cpu_capability()
        known = list(CAPABILITIES)
        able = [key for key in known if CAPABILITIES[key] == best]
        if not able:
            print(f"skipped: {best} is no capability that this test knows")
            return 77
        failed = 0
        for each in known[: known.index(able[0]) + 1]:
            environment = os.environ | {"ATEN_CPU_CAPABILITY": each}
            failed |= subprocess.run([sys.executable, *sys.argv], env=environment).returncode
        return failed
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        separate = capability == "default"
        roots, wrong = square_roots(folder)
        good = [run(probe, roots, name, seed, separate, folder) for name in STATES]
        good.extend([wrong == 0, refuses(probe, roots, folder)])
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
