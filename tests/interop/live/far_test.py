# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not on the CPU: on a test device with memory that crashes on direct access, and with copies as late
as PyTorch allows (far_device.cc).

    far_test.py BIN PACKAGE DEVICE

A checkpoint is loaded into a model and an optimizer there, bit for bit as on the CPU, and files of holes are filled from there.
"""

import io
import os
import sys
import types
import unittest

import live  # first: it makes the modules of the other tests importable
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

STEPS = 3
RATE = 0.02
DEVICE = None


def make_model():
    """Its largest tensor is several units long."""
    return torch.nn.Sequential(torch.nn.Embedding(300, 1000), torch.nn.Linear(1000, 900), torch.nn.BatchNorm1d(900),
                               torch.nn.Linear(900, 3, dtype=torch.bfloat16))


def save(path):
    """A checkpoint of a model on the CPU that has made some steps."""
    torch.manual_seed(7)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    for buffer in model.buffers():
        buffer.copy_(torch.arange(1, buffer.numel() + 1).view(buffer.shape))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)


def have_far():
    if not hasattr(torch, "far"):
        torch.ops.load_library(DEVICE)
        module = types.ModuleType("torch.far")  # the functions that PyTorch looks up in the module of a device
        module.is_available = module.is_initialized = lambda: True
        module._is_in_bad_fork = lambda: False
        module.manual_seed_all = lambda seed: None
        module.current_device, module.device_count = lambda: 0, lambda: 1
        torch._register_device_module("far", module)
    return torch.device("far:0")


def meet_by(backend, meet):
    """The trainer's process group is of another backend than gloo, so that the package has to make one of its own."""
    dist.destroy_process_group()
    dist.Backend.register_backend(backend, lambda store, rank, world, wait: dist.ProcessGroupGloo(store, rank, world, wait),
                                  devices=["cpu"])
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))


def loaded_on(device, source, options, path, backend=None):
    """Collective. Everything that a trainer has after a load; the messages."""
    import shardwright
    if backend is not None:
        meet_by(backend, path.with_suffix(".meet"))
    model = make_model().to(have_far() if device == "far" else device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    with torch.device(model[0].weight.device):  # the device of a program's own tensors does not affect the load
        loaded = shardwright.load((model, optimizer), source, **options)
    state = live.state_of(model, optimizer) | dict(model.named_buffers())
    where = {tensor.device.type for name, tensor in state.items() if not name.endswith("/step")}
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, path)
    return {"step": int(loaded), "read": loaded.bytes_read, "filled": loaded.bytes_filled, "where": sorted(where),
            "rates": [group["lr"] for group in optimizer.param_groups]}


def two_groups(meet):
    """Collective. Ranks in the group of this rank, as seen by a group of the package's own, and by the trainer's next
    one."""
    from shardwright._group import Group
    meet_by("other", meet)
    rank = dist.get_rank()
    groups = [dist.new_group(ranks, backend="other") for ranks in ([0, 1], [2, 3])]
    mine = Group(groups[rank // 2])
    found = mine.gather(rank)
    mine.close()
    everybody = [None] * 4
    dist.all_gather_object(everybody, found, group=dist.new_group(range(4), backend="other"))
    return everybody


def refused(source):
    """Collective. Messages about tensors without elements, and about those that threads cannot fill."""
    import shardwright
    with torch.device("meta"):
        models = [make_model()]
    with torch.inference_mode():
        models.append(make_model().to(have_far()))
    said = []
    for model in models:
        try:
            shardwright.load(model, source)
        except shardwright.Error as error:
            said.append([error.code, str(error)])
    return said


def saved(path, stretches):
    """The tensors of a file of holes; its larger ones were filled in byte ranges of this size."""
    from shardwright import _device_memory, _files
    device = have_far()
    _device_memory.CHUNK = 10_000
    torch.manual_seed(3)
    values = {"large": torch.randn(40_000), "bits": torch.randn(3000, dtype=torch.bfloat16), "small": torch.arange(9),
              "none": torch.empty(0), "turned": torch.randn(60, 70).t()}
    file = _files.SparseFile(path, {name: tensor.to(device) for name, tensor in values.items()})
    size = path.stat().st_size
    file.fill(file.parts([(first, min(stretches, size - first)) for first in range(file._first, size, stretches)]))
    found = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    return [name for name in values if not torch.equal(found[name], values[name])]


def packed(dtype):
    """Names of results of the operators on tokens, forward and backward, that are not those of the CPU: bit for bit, but for
    sums over a token, which PyTorch adds in an order of its own."""
    from shardwright import _library
    have_far()  # before the operators are registered for the devices that there are
    operators, found = _library.operators(), {}
    place = torch.tensor([[0, 3], [1, -1], [2, 4], [5, 6], [7, -1]])
    for device in ("cpu", "far"):
        torch.manual_seed(11)
        kind = getattr(torch, dtype)
        tokens, weights = (torch.randn(5, 6).to(kind).to(device).requires_grad_(), torch.rand(5, 2).to(device).requires_grad_())
        rows = operators.pack_tokens(tokens, place.to(device), weights, 8)
        back = operators.unpack_tokens(rows, place.to(device), weights)
        (back * back).sum().backward()
        parts = operators.sum_parts(torch.stack([rows.detach(), rows.detach() / 3]).reshape(2, -1))
        found[device] = {"rows": rows, "back": back, "parts": parts, "tokens.grad": tokens.grad, "weights.grad": weights.grad}
        if {tensor.device.type for tensor in found[device].values()} != {device}:
            raise AssertionError(f"a result is not on {device}")
    near = {name: tensor.cpu() for name, tensor in found["far"].items()}
    torch.testing.assert_close(near.pop("weights.grad"), found["cpu"].pop("weights.grad"))
    return [name for name, tensor in near.items() if not torch.equal(tensor, found["cpu"][name])]


def late():
    """The result of a copy off the device before a wait for it, and after."""
    tensor = torch.arange(100.0).to(have_far())
    here = torch.zeros(100)
    here.copy_(tensor, non_blocking=True)
    before = here.count_nonzero().item()
    torch.accelerator.synchronize()
    return [before, here.count_nonzero().item()]


class Far(live.InFolder):
    def setUp(self):
        super().setUp()
        self.source = self.folder / "ckpt"
        ranks.run(1, save, self.source)

    def test_the_device_is_late(self):
        self.assertEqual(ranks.run(1, late), [0, 99])

    def test_loads(self):
        for world, options, backend in ((1, {"threads": 1}, None), (1, {"threads": 3}, None),
                                        (2, {"threads": 2, "memory": 24 << 20}, None), (2, {"threads": 1}, "other")):
            with self.subTest(ranks=world, backend=backend, **options):
                told = [ranks.run(world, loaded_on, device, self.source, options, self.folder / f"{device}.pt", backend)
                        for device in ("cpu", "far")]
                want, got = (torch.load(self.folder / f"{device}.pt", weights_only=True) for device in ("cpu", "far"))
                self.assertEqual(live.differing(got, want), [])
                self.assertEqual(told[1]["where"], ["far"])
                self.assertEqual(told[1] | {"where": ["cpu"]}, told[0])
                self.assertEqual((told[1]["step"], told[1]["rates"]), (STEPS, [RATE]))
                print(f"{world} ranks: {len(got)} tensors, {told[1]['filled']} bytes filled of {told[1]['read']} read")

    def test_groups(self):
        self.assertEqual(ranks.run(4, two_groups, self.folder / "meet", seconds=3000), [[0, 1]] * 2 + [[2, 3]] * 2)

    def test_memory(self):
        """The memory that a device copies from counts too."""
        options = {"threads": 1, "memory": 9 << 20}
        ranks.run(1, loaded_on, "cpu", self.source, options, self.folder / "cpu.pt")
        with self.assertRaisesRegex(RuntimeError, "memory 9.00 MiB: 1 thread need 10.0 MiB of buffers"):
            ranks.run(1, loaded_on, "far", self.source, options, self.folder / "far.pt")

    def test_refused(self):
        (code, said), (other_code, other) = ranks.run(1, refused, self.source)
        self.assertEqual((code, other_code), (9, 9))
        self.assertIn("on device meta", said)
        self.assertIn("torch.inference_mode()", other)

    def test_tokens(self):
        for dtype in ("float32", "bfloat16"):
            self.assertEqual(ranks.run(1, packed, dtype), [])

    def test_files_of_holes(self):
        for number, stretches in enumerate((1 << 20, 50_001, 4096)):
            self.assertEqual(ranks.run(1, saved, self.folder / f"{number}.pt", stretches), [])


if __name__ == "__main__":
    Far.ucp = live.start()
    DEVICE = sys.argv.pop(1)
    unittest.main(verbosity=2)
