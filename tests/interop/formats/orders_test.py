# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that list parameters in another order than the model: FSDP1's flat vectors, pipelines saved by
torch.distributed.checkpoint, and DeepSpeed's own round robin of gradients. DeepSpeed resumes from the outputs. Its files have no names for the optimizer's state.

    orders_test.py BIN

All weights have the same shape, so only their values show an exchange.
"""

import json
import pathlib
import sys
import unittest
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it sets the environment up
import commands
import deepspeed
import tensors
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore")
WIDTH = 8
STATES = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """A model, or the parts of it that a pipeline's rank has."""

    def __init__(self, blocks=range(4), ends=("embed", "head")):
        super().__init__()
        if "embed" in ends:
            self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleDict({str(block): Block() for block in blocks})
        if "head" in ends:
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for part in [getattr(self, "embed", None), *self.blocks.values(), getattr(self, "head", None)]:
            x = x if part is None else part(x)
        return x


def tied_net():
    net = Net()
    net.head.weight = net.embed.weight
    return net


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def train(model, optimizer):
    for seed in range(3):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(5, WIDTH)).square().sum().backward()
        optimizer.step()


def named(weights, state_of):
    """The tensors of a model in float32, under the names of tensors.py."""
    found = {f"{name}/{kind}": weight for name, weight in weights.items() for kind in ("fp32", "computed")}
    return found | {f"{name}/{key}": state_of(name, key) for name in weights for key in STATES}


def fsdp1(net):
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_mesh=mesh,
                                     device_id=torch.device("cpu"), use_orig_params=False)
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer)
    return model, optimizer


def full_state(model, optimizer):
    """Collective. The complete weights and optimizer states of FSDP1, by name."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                                                  FullStateDictConfig(rank0_only=False)):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def tied_vectors(folder):
    """Collective. Trains with FSDP1 and saves as verl does. Each name of a tied weight is a tensor of its own there."""
    model, optimizer = fsdp1(tied_net())
    ranks_of = f"world_size_{torch.distributed.get_world_size()}_rank_{torch.distributed.get_rank()}.pt"
    (folder / "verl").mkdir(exist_ok=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT,
                                                  ShardedStateDictConfig(offload_to_cpu=False)):
        torch.save(model.state_dict(), folder / "verl" / f"model_{ranks_of}")
    torch.save(optimizer.state_dict(), folder / "verl" / f"optim_{ranks_of}")
    torch.save({"lr_scheduler": None, "rng": None}, folder / "verl" / f"extra_state_{ranks_of}")
    weights, states = full_state(model, optimizer)
    if torch.distributed.get_rank() == 0:
        config = {"FSDP_version": 1, "world_size": torch.distributed.get_world_size()}
        (folder / "verl" / "fsdp_config.json").write_text(json.dumps(config))
        del weights["head.weight"]
        torch.save(named(weights, lambda name, key: states["state"][name][key]), folder / "expected.pt")


def flat_vectors(folder):
    """Collective. Trains with FSDP1 and saves as DCP and as Accelerate does; both have names."""
    model, optimizer = fsdp1(Net())
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "dcp")
    weights, states = full_state(model, optimizer)
    if torch.distributed.get_rank() == 0:
        (folder / "accelerate").mkdir()
        torch.save(weights, folder / "accelerate" / "pytorch_model_fsdp.bin")
        torch.save(states, folder / "accelerate" / "optimizer.bin")
        torch.save(named(weights, lambda name, key: states["state"][name][key]), folder / "expected.pt")


# By rank: its blocks and ends. The whole model's names are those of Net().
PIPELINES = {
    "plain": [((0, 1), ("embed",)), ((2, 3), ("head",))],
    "interleaved": [((0, 2), ("embed",)), ((1, 3), ("head",))],
    "v": [((0, 3), ("embed", "head")), ((1, 2), ())],
    "ends": [((), ("embed", "head")), ((0, 1, 2, 3), ())],
    "replicated": [((0, 1), ("embed",)), ((0, 1), ("embed",)), ((2, 3), ("head",)), ((2, 3), ("head",))],
}


def stages(folder, parts):
    """Collective. Each rank trains and saves its part with a flat optimizer."""
    blocks, ends = parts[torch.distributed.get_rank()]
    torch.manual_seed(sum(blocks) + len(ends))
    model = Net(blocks, ends)
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "dcp")
    mine = named(weights, lambda name, key: states[f"state.{name}.{key}"])
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    if torch.distributed.get_rank() == 0:
        torch.save({name: tensors for one in every for name, tensors in one.items()}, folder / "expected.pt")


def engine_of(model, **zero):
    config = {"train_micro_batch_size_per_gpu": 5, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)[0]


def four_squares():
    return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4)))


def aligned(folder):
    """Collective. Each rank has two of four weights, in an order that is both that of the model and a round robin."""
    torch.manual_seed(1)
    engine = engine_of(four_squares(), stage=2, parameter_alignment=True, round_robin_gradients=True)
    for seed in range(3):
        torch.manual_seed(seed)
        engine.backward(engine(torch.randn(5, 5)).square().sum())
        engine.step()
    engine.save_checkpoint(folder / "aligned")
    weights = {name: weight.detach() for name, weight in engine.module.named_parameters()}
    moments = {(name, key): safe_get_full_optimizer_state(weight, key)
               for name, weight in engine.module.named_parameters() for key in STATES}
    if torch.distributed.get_rank() == 0:
        torch.save(named(weights, lambda name, key: moments[name, key]), folder / "expected.pt")


def differences(checkpoint, folder, make):
    """Resumes a model of one parameter group in DeepSpeed; the names of the tensors that differ."""
    torch.manual_seed(2)
    model = make()
    engine = engine_of(model, stage=1)
    if engine.load_checkpoint(checkpoint)[0] is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {checkpoint}")
    expected = torch.load(folder / "expected.pt", weights_only=True)
    found = tensors.stages_1_and_2(engine, {id(weight): name for name, weight in model.named_parameters()})
    found |= {f"{name}/computed": weight.detach() for name, weight in model.named_parameters()}
    return tensors.unequal(found, expected)


class Orders(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def load(self, source, name, *flags):
        self.ucp.run("ucp-load", source, self.folder / name, *flags)
        return self.folder / name

    def resumes(self, source, name, make=Net):
        out = self.load(source, name, "--format", "deepspeed", "--target", "zero=1,dp=1")
        self.assertEqual(ranks.run(1, differences, out, self.folder, make), [])
        return out

    def test_round_robin_with_aligned_parameters(self):
        ranks.run(2, aligned, self.folder)
        self.resumes(self.folder / "aligned", "native", four_squares)

    def test_flat_vectors_of_fsdp1(self):
        ranks.run(2, flat_vectors, self.folder)
        native = self.resumes(self.folder / "dcp", "from-dcp")
        self.resumes(self.folder / "accelerate", "from-accelerate")
        verl = ("--format", "dtensor", "--target", "trainer=verl,dp_shard=2,fsdp_version=")
        for version in "12":
            for source, name in ((self.folder / "dcp", "dcp"), (native, "native")):
                with self.subTest(source=name, fsdp_version=version):
                    files = self.load(source, f"verl{version}-{name}", *verl[:-1], verl[-1] + version)
                    self.resumes(files, f"from-verl{version}-{name}")

    def test_tied_flat_vectors(self):
        ranks.run(2, tied_vectors, self.folder)
        self.resumes(self.folder / "verl", "native", tied_net)
        again = self.load(self.folder / "verl", "again", "--target", "dp_shard=3")
        self.resumes(again, "native-again", tied_net)

    def test_pipelines(self):
        for name, parts in PIPELINES.items():
            with self.subTest(name):
                folder = self.folder / name
                folder.mkdir()
                ranks.run(len(parts), stages, folder, parts)
                native = ("--format", "deepspeed", "--target", "zero=1,dp=1")
                if name == "plain":
                    out = self.load(folder / "dcp", f"{name}-native", *native)
                    self.assertEqual(ranks.run(1, differences, out, folder, Net), [])
                    continue
                said = self.ucp.run("ucp-load", folder / "dcp", self.folder / f"{name}-native", *native, expect=9)
                self.assertIn("had different parts of the model", said)
                said = self.ucp.run("ucp-load", folder / "dcp", self.folder / f"{name}-verl", "--format", "dtensor",
                                    "--target", "trainer=verl,dp_shard=2", expect=9)
                self.assertIn("trainer=accelerate identifies parameters by name", said)
                self.load(folder / "dcp", f"{name}-universal", "--format", "universal")
                self.load(folder / "dcp", f"{name}-accelerate", "--format", "dtensor", "--target",
                          "trainer=accelerate,dp_shard=2")


if __name__ == "__main__":
    Orders.ucp = commands.Commands(sys.argv.pop(1), "")
    unittest.main()
