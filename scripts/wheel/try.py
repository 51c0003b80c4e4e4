# SPDX-License-Identifier: Apache-2.0
"""Run by scripts/package in a chroot that has the wheel and PyTorch: loads the demo's checkpoint into a model, compares it
with the output of ucp-load, and looks for the installed documentation."""

import json
import pathlib
import subprocess
import tempfile

import shardwright
import torch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DEMO = "/shardwright/tests/data/demo"
with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "model"
    subprocess.run(["ucp-load", DEMO, out, "--format", "safetensors", "--only", "master"], check=True)
    (file,) = out.glob("*.safetensors")
    data = bytearray(file.read_bytes())
length = int.from_bytes(data[:8], "little")
expected = {}
for name, entry in json.loads(data[8 : 8 + length]).items():
    if name == "__metadata__":
        continue
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    expected[name] = torch.frombuffer(data[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])

model = torch.nn.Module()
for name, tensor in expected.items():
    *path, leaf = name.split(".")
    inner = model
    for part in path:
        if not hasattr(inner, part):
            inner.add_module(part, torch.nn.Module())
        inner = getattr(inner, part)
    inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor)))

step = shardwright.load(model, DEMO, strict=False)
filled = dict(model.named_parameters())
different = [name for name, tensor in expected.items() if not torch.equal(filled[name], tensor)]
if not expected or different or step.missing:
    raise SystemExit(f"{len(expected)} tensors, different: {different}, missing: {step.missing}")
if shardwright.DOCS is None:
    raise SystemExit("the Python package does not find the documentation of the wheel")
print(f"python package: torch {torch.__version__}, step {step}, {len(expected)} tensors equal")
