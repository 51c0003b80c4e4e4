#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small mixture of experts is trained with torch's AdamW in mixed precision, saved partially, and the
gradients that the optimizer used are logged. pec-restore --replay has to give the state of the training
itself, bit for bit, in any layout. The log is written by tests/crash/gradient_log.py.

    restore_test.py BIN
"""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

import numpy
import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "crash"), str(ROOT / "tests" / "cli" / "pec")]

import gradient_log
import moe_checkpoint
import stores
from gradient_log import Log, adamw, piece

FIRST, LAST = 3, 14
OVERFLOWS = {6, 11}
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def raw(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


class Training(moe_checkpoint.Model):
    """poison: an iteration with an infinity and a NaN in its gradients of expert 0 of layer 0."""

    def __init__(self, poison=None, **options):
        super().__init__(hidden=16, experts=8, dtype="bf16", **options)
        torch.manual_seed(self.seed)
        self.poison = poison
        self.expert_of = {}
        shapes = dict(self.dense)
        for layer in range(self.layers):
            for e in range(self.experts):
                for suffix, shape in self.expert.items():
                    shapes[f"{self.module(layer, e)}.{suffix}"] = shape
                    self.expert_of[f"{self.module(layer, e)}.{suffix}"] = self.module(layer, e)
        self.masters = {n: torch.nn.Parameter(torch.randn(s) * 0.3) for n, s in shapes.items()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=3e-3, betas=(0.9, 0.95),
                                           weight_decay=0.1, foreach=False, fused=False)
        self.held, self.steps, self.gradients, self.made = {}, {}, {}, 0
        self.fused = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
        for iteration in range(1, LAST + 1):
            self.train(iteration)

    def step(self, iteration):
        return sum(1 for i in range(1, iteration + 1) if i not in OVERFLOWS)

    def loss(self, weights, tokens):
        x = torch.nn.functional.embedding(tokens, weights["emb.weight"])
        for layer in range(self.layers):
            qkv = torch.nn.functional.linear(x, weights[f"blocks.{layer}.qkv.weight"])
            q, k, v = qkv.chunk(3, -1)
            x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            scores = torch.softmax(torch.nn.functional.linear(
                x, weights[f"blocks.{layer}.moe.deepspeed_moe.gate.wg.weight"]).float(), -1)
            gate, best = scores.max(-1)
            out = torch.zeros_like(x)
            for e in range(self.experts):
                module = self.module(layer, e)
                y = torch.relu(torch.nn.functional.linear(x, weights[f"{module}.0.weight"]))
                y = torch.nn.functional.linear(y, weights[f"{module}.2.weight"])
                out = out + y * (gate * (best == e)).to(y.dtype).unsqueeze(-1)
            x = x + out
        return (x.float() - 1).square().mean()

    def train(self, iteration):
        """One step in bfloat16 on float32 masters, with a loss scale, and clipping on odd ones."""
        scale = 1024.0 if iteration < 8 else 512.0
        weights = {n: p.detach().to(torch.bfloat16).requires_grad_() for n, p in self.masters.items()}
        tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(iteration))
        (self.loss(weights, tokens) * scale).backward()
        clip = 1.7 if iteration % 2 else 1.0
        factor, skipped = 1.0 / (scale * clip), iteration in OVERFLOWS
        self.optimizer.param_groups[0].update(lr=3e-3 / iteration, weight_decay=0.1 if iteration < 9 else 0.05)
        if not skipped:
            self.made += 1
        group = self.optimizer.param_groups[0]
        for name, master in self.masters.items():
            gradient = weights[name].grad
            gradient = torch.zeros_like(weights[name]) if gradient is None else gradient
            if iteration == self.poison and self.expert_of.get(name) == self.module(0, 0):
                gradient.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), float("-inf")])
            self.gradients[name, iteration] = gradient
            master.grad = gradient.float().mul_(factor)
        if not skipped:
            self.optimizer.step()
        self.steps[iteration] = adamw(self.made, lr=group["lr"], betas=group["betas"], eps=group["eps"],
                                      weight_decay=group["weight_decay"], factor=factor, skipped=skipped,
                                      fused=self.fused)
        if iteration < FIRST:
            return
        for name, master in self.masters.items():
            self.held[name, "fp32", iteration] = raw(master)
            self.held[name, "weight", iteration] = raw(master.detach().to(torch.bfloat16))
            for state in STATES:
                self.held[name, state, iteration] = raw(self.optimizer.state[master][state])

    def data(self, name, state, shape, iteration):
        return self.held[name, state, iteration]

    def weight(self, name, shape, iteration):
        return moe_checkpoint.ptfile.tensor("BFloat16Storage", self.held[name, "weight", iteration], shape, 2)


def put_roots(folder):
    """The table of torch's square roots; \\returns its digest."""
    one = 0x3F800000
    bits = numpy.arange(one, one + 2**24, dtype=numpy.uint32).view(numpy.float32)
    found = torch.sqrt(torch.from_numpy(bits)).numpy().view(numpy.int32)
    codes = numpy.roll(found - numpy.sqrt(bits).view(numpy.int32), one % 2**24) + 1
    codes = codes.astype(numpy.uint8).reshape(-1, 4)
    packed = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    data = struct.pack("<I", 0x7F7FFFFF) + packed.astype(numpy.uint8).tobytes()
    digest = gradient_log.digest(data).hex()
    folder.mkdir(exist_ok=True)
    (folder / f"roots-{digest}.swr").write_bytes(data)
    return digest


class Restoring(stores.Stores):
    @classmethod
    def setUpClass(cls):
        cls.shared = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-torch-", dir=stores.scratch_parent()))
        cls.addClassCleanup(shutil.rmtree, cls.shared)
        cls.model = Training()
        cls.tokens_path, _ = moe_checkpoint.series(cls.shared / "run", cls.model, range(FIRST, LAST + 1))

    def log(self, model, writers=3, dtype="bfloat16"):
        """Every expert, each writer a range of every gradient."""
        fingerprint = json.loads((self.store / "store.json").read_text())["fingerprint"]
        roots = put_roots(self.store / "logs")
        for writer in range(writers):
            log = Log(self.store / "logs", fingerprint, writer)
            for iteration in range(FIRST + 1, LAST + 1):
                step = {**model.steps[iteration], "roots": roots}
                if iteration == 9:
                    log.begin()
                for module in sorted(set(model.expert_of.values())):
                    pieces = []
                    for name in (n for n, m in model.expert_of.items() if m == module):
                        gradient = model.gradients[name, iteration].flatten()
                        if dtype == "float32":
                            gradient = gradient.float()
                        first = gradient.numel() * writer // writers
                        last = gradient.numel() * (writer + 1) // writers
                        data = b"" if step["skipped"] else raw(gradient[first:last])
                        one = piece(name, gradient.numel(), data, first, dtype)
                        pieces.append({**one, "count": last - first})
                    log.record(iteration, module, [step], pieces)
                log.mark()

    def check(self, out, iteration=LAST):
        self.same(out, iteration, {}, self.model)

    def test_the_training_itself(self):
        for iteration in range(FIRST, LAST + 1):
            self.save(iteration, "--k", 1)
        self.log(self.model)
        for target in ("ep=2", "ep=1", "ep=4,dp=4", "ep=8,dp=8"):
            with self.subTest(target):
                result = self.restore(f"out-{target}", "--replay=require", "--read-only", "--target", target)
                self.assertEqual(result["iteration"], LAST)
                self.assertGreaterEqual(result["replay"]["modules"], 14)
                self.check(f"out-{target}")
        self.restore("universal", "--replay=require", "--read-only", "--format", "universal")
        self.check("universal")
        for at in range(FIRST + 1, LAST):
            self.restore(f"at-{at}", "--replay=require", "--read-only", "--at", at)
            self.check(f"at-{at}", at)

    def test_gradients_in_float32(self):
        for iteration in (FIRST, LAST):
            self.save(iteration, "--k", 2)
        self.log(self.model, writers=1, dtype="float32")
        result = self.restore("out", "--replay=require")
        self.assertEqual(max(m["replayed"]["iterations"] for m in result["modules"] if "replayed" in m),
                         LAST - FIRST)
        self.check("out")

    def test_infinities_and_nan(self):
        model = Training(poison=10)
        moe_checkpoint.series(self.work / "run", model, (FIRST, LAST))
        for iteration in (FIRST, LAST):
            # The expert with the NaN is not saved again.
            self.save(iteration, "--k", 1, source=self.work / "run")
        self.log(model)
        self.restore("out", "--replay=require", "--format", "universal")
        compared = nans = 0
        for path in (self.work / "out").rglob("*.pt"):
            name, state = path.parent.name, path.stem
            if (name, state, LAST) not in model.held or name not in model.expert_of:
                continue
            with zipfile.ZipFile(path) as atom:
                payload, = (n for n in atom.namelist() if n.endswith("/data/0"))
                found = numpy.frombuffer(atom.read(payload), dtype=numpy.float32)
            wanted = numpy.frombuffer(model.held[name, state, LAST], dtype=numpy.float32)
            same = (found.view(numpy.uint32) == wanted.view(numpy.uint32)) | (
                numpy.isnan(found) & numpy.isnan(wanted))
            self.assertTrue(same.all(), path)
            compared, nans = compared + 1, nans + int(numpy.isnan(wanted).sum())
        self.assertEqual(compared, 3 * len(model.expert_of))
        self.assertGreater(nans, 0)


if __name__ == "__main__":
    if gradient_log.LIBRARY is None:
        print("skipped: no libxxhash")
        sys.exit(77)
    torch.set_num_threads(1)
    if "ATEN_CPU_CAPABILITY" not in os.environ:
        # Once more with kernels that round otherwise.
        other = subprocess.run([sys.executable, *sys.argv], check=False,
                               env={**os.environ, "ATEN_CPU_CAPABILITY": "default"})
        if other.returncode != 0:
            sys.exit("failed with ATEN_CPU_CAPABILITY=default")
    stores.main()
