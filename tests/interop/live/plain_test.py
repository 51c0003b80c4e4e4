# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are loaded straight into FSDP2, tensor parallelism, DDP and a single process, bit for bit as PyTorch's own
loader does it from the output of ucp-load, and the next losses are equal.

    plain_test.py BIN PACKAGE [--all]

With --all into more layouts.
"""

import unittest

import live  # first: it makes the modules of the other tests importable
import hops
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 2
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# Layout: ranks.
LAYOUTS = {"fsdp2": 3, "hsdp": 4, "fsdp2_tp": 4, "ddp": 2, "single": 1}


def share_out(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def build(layout, family):
    """Collective. The module to call, the model, and the mesh dimension of ranks that read other samples."""
    model, world = hops.make_model(family, 105), dist.get_world_size()
    if layout == "fsdp2":
        share_out(model, init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        share_out(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")))
    elif layout == "fsdp2_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            plan = {name: ColwiseParallel() if name.rsplit(".", 1)[1] in COLUMNS else RowwiseParallel()
                    for name, _ in layer.named_modules() if name.endswith("_proj")}
            parallelize_module(layer, mesh["tp"], plan)
        share_out(model, mesh["dp"])
        return model, model, (mesh["dp"].get_local_rank(), world // 2)
    elif layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), model, (dist.get_rank(), world)
    return model, model, (dist.get_rank(), world)


def load_own(model, optimizer, source):
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def go_on(layout, family, source, own, path):
    """Collective. Loads, keeps every tensor in the file `path`, and continues training; the losses, and the bytes
    read."""
    import shardwright
    called, model, (place, places) = build(layout, family)
    optimizer = hops.make_optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # the checkpoint's is wanted
    said = None
    if own:
        load_own(model, optimizer, source)
    else:
        loaded = shardwright.load((called, optimizer), source, threads=1)
        said = {"step": int(loaded), "filled": loaded.bytes_filled, "read": loaded.bytes_read,
                "lists": loaded.missing + loaded.unused}
    state = live.state_of(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, path)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(STEPS, 2 * STEPS):
        tokens = hops.batch(step).chunk(places)[place]
        loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(hops.mean_loss(loss))
    return {"losses": losses, "rates": rates, "said": said}


class Plain(live.InFolder):
    def judge(self, family, source, layouts):
        converted = self.folder / "dcp"
        self.ucp.run("ucp-load", source, converted, "--format", "dcp", "--target", "dp_shard=2")
        for layout in layouts:
            with self.subTest(family, source=source.name, layout=layout):
                states = {name: self.folder / f"{layout}-{name}.pt" for name in ("own", "live")}
                want = ranks.run(LAYOUTS[layout], go_on, layout, family, converted, True, states["own"])
                got = ranks.run(LAYOUTS[layout], go_on, layout, family, source, False, states["live"])
                one, other = (torch.load(states[name], weights_only=True) for name in ("live", "own"))
                self.assertEqual(live.differing(one, other), [])
                self.assertEqual(got["losses"], want["losses"])
                self.assertEqual(got["rates"], [hops.RATE] * 2)
                self.assertEqual(got["said"]["step"], STEPS)
                self.assertEqual(got["said"]["lists"], [])
                print(f"{family} from {source.name} into {layout}: {len(one)} tensors and {STEPS} losses equal, "
                      f"{got['said']['filled']} bytes filled of {got['said']['read']} read")

    def test_from_deepspeed(self):
        ranks.run(2, hops.in_deepspeed, "llama", 2, None, self.folder / "zero2", (0, STEPS))
        self.judge("llama", self.folder / "zero2", LAYOUTS if live.EVERYTHING else ("hsdp", "fsdp2_tp"))

    def test_from_fsdp2(self):
        ranks.run(2, hops.in_fsdp2, "llama", None, self.folder / "fsdp2", (0, STEPS))
        self.judge("llama", self.folder / "fsdp2", ("fsdp2", "fsdp2_tp") if live.EVERYTHING else ("fsdp2",))

    def test_experts(self):
        ranks.run(2, hops.in_deepspeed, "mixtral", 3, None, self.folder / "zero3", (0, STEPS))
        self.judge("mixtral", self.folder / "zero3", ("fsdp2", "ddp") if live.EVERYTHING else ("ddp",))

    def test_from_fsdp2_into_deepspeed(self):
        """As DeepSpeed's own loader has it from native files."""
        ranks.run(2, hops.in_fsdp2, "llama", None, self.folder / "fsdp2", (0, STEPS))
        native = self.folder / "native"
        self.ucp.run("ucp-load", self.folder / "fsdp2", native, "--format", "deepspeed", "--target", "zero=3,dp=2")
        steps = (STEPS, 2 * STEPS)
        want = ranks.run(2, hops.in_deepspeed, "llama", 3, native, None, steps)
        got = ranks.run(2, hops.in_deepspeed, "llama", 3, self.folder / "fsdp2", None, steps, live.into_engine)
        self.assertEqual(got, want)


if __name__ == "__main__":
    Plain.ucp = live.start()
    unittest.main(verbosity=2)
