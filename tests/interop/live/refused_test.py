# SPDX-License-Identifier: Apache-2.0
"""State that cannot be loaded into a trainer gives an error with a message and a code, on all ranks, and no rank hangs.

    refused_test.py BIN PACKAGE
"""

import os
import pathlib
import signal
import time
import unittest
from unittest import mock

import live  # first: it makes the modules of the other tests importable
import commands
import ranks
import torch
import torch.distributed as dist

DATA = live.HERE.parents[1] / "data/deepspeed"
SOURCE = DATA / "zero1_w2/ckpt"


def names_and_shapes():
    from safetensors import safe_open
    with safe_open(DATA / "zero1_w2/expected.safetensors", "pt") as file:
        kinds = {key: key.rsplit("/", 1) for key in file.keys()}
        return {name: (kind, file.get_tensor(key)) for key, (name, kind) in kinds.items() if kind in ("fp32", "buffer")}


class Holder(torch.nn.Module):
    """Any names: parameters and buffers one below the other."""

    def add(self, name, tensor, trained):
        first, _, rest = name.partition(".")
        if rest:
            if not hasattr(self, first):
                self.add_module(first, Holder())
            getattr(self, first).add(rest, tensor, trained)
        elif trained:
            self.register_parameter(first, torch.nn.Parameter(tensor))
        else:
            self.register_buffer(first, tensor)


def model_of(change=None):
    """A model with the tensors of the checkpoint, zeros; `change` gets and returns name and tensor, or None."""
    model = Holder()
    for name, (kind, tensor) in names_and_shapes().items():
        name, tensor = (change or (lambda *pair: pair))(name, torch.zeros_like(tensor))
        if tensor is not None:
            model.add(name, tensor, kind == "fp32")
    return model


def failure(target, source=SOURCE, **options):
    """(code, message) of the load that must fail."""
    import shardwright
    try:
        shardwright.load(target, source, threads=1, **options)
    except shardwright.Error as error:
        return error.code, str(error)
    raise AssertionError("it was loaded")


def one_rank_differs():
    """Collective. Only the last rank has tensors that cannot be loaded; what every rank hears."""
    last = dist.get_rank() == dist.get_world_size() - 1
    model = model_of((lambda name, one: (name, one.repeat(1, 2)[:, ::2] if one.dim() == 2 else one)) if last else None)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, failure((model, None)))
    return found


def one_rank_dies(source):
    """Collective. Rank 1 ends in the middle: the other one raises."""
    model = model_of()
    if dist.get_rank() == 1:
        os._exit(0)
    code, message = failure((model, None), source)
    pathlib.Path(os.environ["SAID"]).write_text(f"{code} {message}")
    os._exit(0)


def one_rank_calls(folder):
    """Collective. Each rank in turn calls load while the other one never does: (code, message) of both."""
    said = []
    for caller in range(2):
        group, path = dist.new_group([0, 1]), folder / f"said{caller}"  # of its own: a wait that ends in an error breaks it
        if dist.get_rank() == caller:
            said = failure((model_of(), None), group=group, deadline=1)
            path.touch()
        while not path.exists():
            time.sleep(0.01)
    found = [None, None]
    dist.all_gather_object(found, said)
    return found


def one_rank_calls_without_gloo(folder, caller):
    """Collective. One rank calls load with a process group that has no gloo backend: what it raises."""
    said, path = None, folder / f"without-gloo{caller}"
    if dist.get_rank() == caller:
        with mock.patch("torch.distributed.get_backend", return_value="nccl"):
            said = failure((model_of(), None), deadline=1)
        path.touch()
    while not path.exists():
        time.sleep(0.01)
    found = [None, None]
    dist.all_gather_object(found, said)
    return found[caller]


def timeout_without_gloo():
    """Collective. The ranks that meet in the group that is made for a process group without a gloo backend, and the seconds
    that its collectives wait afterwards."""
    from shardwright._group import Group
    with mock.patch("torch.distributed.get_backend", return_value="nccl"):
        group = Group(None, "a call", 600)
    try:
        group.meet("a call", 600)
        timeout = group._own._get_backend(torch.device("cpu")).options._timeout
        return group.gather(group.rank), timeout.total_seconds()
    finally:
        group.close()


def one_rank_is_interrupted(source):
    """Collective. Rank 0 gets a SIGINT in the middle of a load; what each rank raises."""
    import shardwright
    from shardwright import _group
    swap, calls = _group.Group._swap, []

    def interrupted(self, *arguments):
        calls.append(1)
        if self.rank == 0 and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return swap(self, *arguments)

    _group.Group._swap = interrupted
    try:
        shardwright.load((model_of(), None), source, threads=1)
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    except shardwright.Error as error:
        said = error.code
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found + [signal.getsignal(signal.SIGINT) is signal.default_int_handler]


class Refused(unittest.TestCase):
    def expect(self, code, words, target, *arguments, **options):
        found = failure(target, *arguments, **options)
        self.assertEqual(found[0], code, found[1])
        for word in words:
            self.assertIn(word, found[1])

    def test_all_is_loaded_where_nothing_is_wrong(self):
        import shardwright
        model = model_of()
        loaded = shardwright.load((model, None), str(SOURCE), threads=1)
        self.assertEqual((loaded.missing, loaded.unused, int(loaded)), ([], [], 4))
        tensors = names_and_shapes()
        for name, param in model.named_parameters():
            self.assertTrue(torch.equal(param, tensors[name][1]), name)

    def test_another_shape(self):
        wider = model_of(lambda name, one: (name, torch.zeros(*one.shape[:-1], one.shape[-1] + 1)))
        self.expect(5, ["the trainer has shape", "the checkpoint has ["], (wider, None))

    def test_a_name_that_is_not_there(self):
        import shardwright
        renamed = model_of(lambda name, one: (name.replace("norm", "Norm"), one))
        self.expect(5, ["the checkpoint does not have", "the trainer does not have", "Norm", "norm"], (renamed, None))
        self.assertTrue(all(not tensor.any() for tensor in renamed.parameters()), "nothing may be touched")
        loaded = shardwright.load((renamed, None), SOURCE, strict=False, threads=1)
        self.assertTrue(all("Norm" in name for name in loaded.missing) and loaded.missing)
        self.assertTrue(all("norm" in name for name in loaded.unused) and loaded.unused)

    def test_strides(self):
        strided = model_of(lambda name, one: (name, one.t().contiguous().t() if one.dim() == 2 else one))
        self.expect(9, ["strides", "only contiguous tensors"], (strided, None))

    def test_element_types_that_do_not_fit(self):
        model = model_of()
        name, buffer = next(iter(model.named_buffers()))
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_buffer(name.rpartition(".")[2], buffer.to(torch.int64))
        self.expect(9, ["no conversion from float32 to int64", name], (model, None))

    def test_devices(self):
        self.expect(9, ["on device meta"], (model_of().to("meta"), None))

    def test_sources(self):
        self.expect(3, ["/nowhere: no such folder"], (model_of(), None), "/nowhere")
        self.expect(2, ["a DeepSpeed engine, (model, optimizer)"], "a text")
        self.expect(8, ["of buffers"], (model_of(), None), memory=1 << 20)

    def test_an_old_torch_is_named(self):
        import shardwright
        from shardwright import _library
        with self.assertRaisesRegex(shardwright.Error, r"torch 2\.9\.1: shardwright needs torch 2\.10 or newer") as raised:
            _library.check_version("2.9.1")
        self.assertEqual(raised.exception.code, 9)
        for version in ("2.10.0", "2.15.0+cpu", "3.0"):
            _library.check_version(version)

    def test_all_ranks_hear_of_one(self):
        found = ranks.run(3, one_rank_differs)
        self.assertEqual({code for code, _ in found}, {9})
        self.assertEqual(len({message for _, message in found}), 1, found)
        self.assertIn("strides", found[0][1])

    def test_a_rank_that_does_not_call(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        for rank, (code, message) in enumerate(ranks.run(2, one_rank_calls, scratch.path)):
            self.assertEqual(code, 2, message)
            self.assertIn(f"shardwright.load: rank {rank} has waited 1 s, and ", message)
            self.assertIn("all ranks of the process group must call it", message)
            if rank == 0:
                self.assertIn("rank 1 has not called it", message)

    def test_a_rank_that_does_not_call_without_gloo(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        for caller in range(2):
            code, message = ranks.run(2, one_rank_calls_without_gloo, scratch.path, caller)
            self.assertEqual(code, 2, message)
            self.assertIn(f"shardwright.load: rank {caller} has waited 1 s, and another rank has not called it: all ranks", message)

    def test_the_deadline_is_not_a_limit_of_later_collectives(self):
        self.assertEqual(ranks.run(2, timeout_without_gloo), [[0, 1], 1800])

    def test_a_rank_that_dies(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        os.environ["SAID"] = str(scratch.path / "said")
        with self.assertRaises(FileNotFoundError):  # both have ended by themselves, without an answer
            ranks.run(2, one_rank_dies, str(SOURCE), seconds=3000)
        self.assertTrue((scratch.path / "said").read_text().startswith("7 "), "the rank that was left has to raise")

    def test_an_interrupt(self):
        self.assertEqual(ranks.run(2, one_rank_is_interrupted, str(SOURCE), seconds=3000), ["KeyboardInterrupt", 75, True])


if __name__ == "__main__":
    live.start()
    unittest.main(verbosity=2)
