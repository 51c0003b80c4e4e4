#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed inputs of the fuzz targets of checkpoint formats: make_corpus.py FOLDER. Same bytes every time.

Catalogues are stored as their form, a byte, and their unpacked content: that of the demo checkpoint, and small ones. Of
each kind of input there are seeds that are read as a whole checkpoint and are as small as possible: a target tries
several times as many inputs that are made of these.
"""

import argparse
import collections
import io
import json
import pathlib
import pickle
import pickletools
import sys
import tempfile
import types
import zipfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position
import ptfile  # pylint: disable=wrong-import-position

ONE_RANK = pathlib.Path(__file__).resolve().parents[2] / "data" / "dtensor" / "fsdp_w1" / "ckpt"
DEMO = pathlib.Path(__file__).resolve().parents[2] / "data" / "demo"
WEIGHT = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
MODEL = (b"mp_rank_00_model_states.pt", b"\x80\x02}.", [b"four"])
HAS_SUM, KEY_IS_INDEX, INLINE_BYTES = 1, 2, 16

ALL_KEYS = {
    "version": 1, "family": "all_keys", "note": "every key once", "requires": [r"a|model\..*"],
    "requires_shapes": [{"match": "model.*", "dim": 0, "times": 6, "of": r"layers.*", "of_dim": 0}],
    "rules": [
        {"match": "a", "split": "dim", "dim": 0, "uneven": True, "note": "x"},
        {"match": r".*c_attn\.bias", "split": "sub", "dim": 0, "ratio": [1, 1, 1]},
        {"match": r".*embed.*", "split": "dim", "dim": 0, "padded": True, "rows": 90, "granule": 4},
        {"match": r"layers.*", "split": "sub", "dim": 1, "view": [2, 8, -1], "sizes": [4, 2, 2], "granule": [2, 1, 1], "uneven": True},
        {"match": r".*norm.*", "split": "average"},
        {"match": r".*", "split": "replicated"},
    ],
}


def number(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def text(content):
    return number(len(content)) + content


def catalogue(dialect, files, form=4, tag=b"global_step1", keys=None):
    """files: (name, pickle, [payload]); payloads follow one another, small ones are inlined. The form comes first.
    keys: of the payloads, and then their descriptions are JSON; without it they are numbers.
    """
    out = number(["deepspeed", "universal"].index(dialect)) if form < 3 else text(dialect.encode())
    out += text(tag) + number(1) + text(b"a warning") + text(b"") + number(len(files))
    for index, (name, pickle, payloads) in enumerate(files):
        size = sum(map(len, payloads)) + 1
        out += text(name) + text(b"/source/" + name) + number(size) + number(2) + number(7)
        if form >= 3:  # one container; in form 4 with new metadata; from the beginning
            out += number(1) + (number(index) if form == 4 else b"") + number(0 if keys is None else 1) + number(0)
        out += number(size) + text(pickle) + number(len(payloads))
        for i, payload in enumerate(payloads):
            key = number(KEY_IS_INDEX | HAS_SUM) if keys is None else number(HAS_SUM) + text(keys[i])
            out += key + number(0) + number(len(payload)) + b"\x01\x02\x03\x04"
        small = [(i, payload) for i, payload in enumerate(payloads) if len(payload) <= INLINE_BYTES]
        out += number(len(small)) + b"".join(number(i) + text(payload) for i, payload in small)
    return bytes([form]) + out + (number(0) + number(0) if form > 1 else b"")


def stored(path):
    """(name, pickle, [payload]) of a file that torch.save wrote."""
    with zipfile.ZipFile(path) as file:
        root = file.namelist()[0].split("/")[0]
        keys = sorted(int(name.rsplit("/", 1)[1]) for name in file.namelist() if "/data/" in name)
        assert keys == list(range(len(keys)))
        return (path.name.encode(), file.read(f"{root}/data.pkl"), [file.read(f"{root}/data/{key}") for key in keys])


def small_deepspeed():
    """A checkpoint of one rank and one parameter, as the files of a catalogue."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        moe_checkpoint.write(run, moe_checkpoint.Model(layers=0, experts=1, ep=1, ranks=1, hidden=1), 1)
        files = [stored(path) for path in sorted(run.glob("*/*.pt"))]
    return [(name, pickletools.optimize(pickled), payloads) for name, pickled, payloads in files]


def small_dumps(value):
    """The pickle without what it does not need, its payloads."""
    pickled, payloads = ptfile.dumps(value)
    return pickletools.optimize(pickled), payloads


def one_tensor():
    """Model and optimizer of the checkpoint of one rank, with the first of its DTensors alone."""
    model, optimizer = (ptfile.load(ONE_RANK / f"{item}_world_size_1_rank_0.pt") for item in ("model", "optim"))
    model = collections.OrderedDict({"embed.weight": model["embed.weight"]})
    optimizer = {"state": {0: optimizer["state"][0]}, "param_groups": [{**optimizer["param_groups"][0], "params": [0]}]}
    return small_dumps(model), small_dumps(optimizer)


def plain_tensor():
    """A model of one tensor that is not a DTensor."""
    return small_dumps(collections.OrderedDict({"w": ptfile.tensor("FloatStorage", bytes(8), (2,), 4)}))


def container(name, dumped):
    """A file of a catalogue, from a pickle and its payloads."""
    return (name, dumped[0], list(dumped[1].values()))


SIDES = [{"name": "a"}, {"name": "b"}]
MAPS = {
    "every_key": {
        "$schema": "s", "version": 1, "map": "m", "note": "", "relations": ["h = g n"],
        "sizes": {"g": {"config": ["groups"]}, "n": {}, "h": {}, "d": {"value": 2}, "v": {}},
        "sides": [{"name": "a", "order": ["l.{layer}.q", "l.{layer}.k", "w"], "derived": ["f"], "note": ""},
                  {"name": "b"}],
        "rules": [
            {"stacks": {"part": ["q=n", "k=1"]}, "note": "",
             "a": {"l.{layer}.q": "(g part.q d) x", "l.{layer}.k": "(g part.k d) x"},
             "b": {"b.{layer}.qk": "x (g part d)"}},
            {"a": {"e.{expert}.w": "{expert} i o"}, "b": {"e.w": "expert o i"}},
            {"a": {"w": "v o"}, "b": {"emb": "v+ o"}},
            {"a": "{*rest}", "b": "r.{*rest}"},
        ]},
    "turned": {"map": "m", "sides": SIDES, "rules": [{"a": {"w": "i o"}, "b": {"x": "o i"}}, {"a": "{*r}", "b": "{*r}"}]},
    "back": {"map": "m", "sizes": {"v": {"value": 5}}, "sides": SIDES,
             "rules": [{"b": {"w": "v+ o"}, "a": {"x": "o v"}}, {"a": "{*r}", "b": "{*r}"}]},
}


def two_pickles(model, optimizer):
    """The offset of the second one, then both."""
    return (2 + len(model)).to_bytes(2, "little") + model + optimizer


class Storage:
    """Stands for torch.FloatStorage, and for one such storage."""

    def __init__(self, elements):
        self.elements = elements


def rebuild_tensor(*_):
    """Stands for torch._utils._rebuild_tensor_v2, which is named and never called."""


class Pickler(pickle.Pickler):
    """Pickles as torch.save does, without torch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.elements = []  # of the storages
        for module, kind, name, stands_for in [("torch", Storage, "FloatStorage", Storage),
                                               ("torch._utils", rebuild_tensor, "_rebuild_tensor_v2", rebuild_tensor)]:
            kind.__module__, kind.__qualname__ = module, name
            sys.modules.setdefault(module, types.ModuleType(module))
            setattr(sys.modules[module], name, stands_for)

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        self.elements.append(value.elements)
        return ("storage", Storage, str(len(self.elements) - 1), "cpu", value.elements)


class Tensor:
    def __init__(self, *shape):
        self.shape = shape

    def __reduce__(self):
        strides, elements = [], 1
        for size in reversed(self.shape):
            strides.insert(0, elements)
            elements *= size
        rest = (0, self.shape, tuple(strides), False, collections.OrderedDict())
        return rebuild_tensor, (Storage(elements), *rest)


def torch_dumps(value):
    """The pickle, the storages' bytes by key: all of them are zeros."""
    out = io.BytesIO()
    pickler = Pickler(out, 2)
    pickler.dump(value)
    return out.getvalue(), {str(key): bytes(4 * count) for key, count in enumerate(pickler.elements)}


def torch_pickle(value):
    return torch_dumps(value)[0]


def small_pickle(value):
    return pickletools.optimize(torch_pickle(value))


def legacy_rank(layers=2, optimizer=True):
    """A Megatron rank: layers of width 4, two heads in one group, a gated MLP, five words padded to six."""
    args = argparse.Namespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, num_layers=layers, num_attention_heads=2,
        num_query_groups=1, kv_channels=2, group_query_attention=True, vocab_size=5, make_vocab_size_divisible_by=3,
        consumed_train_samples=48)
    layer = {"input_layernorm.weight": (4,), "self_attention.linear_proj.weight": (4, 4),
             "self_attention.linear_qkv.weight": (8, 4), "mlp.linear_fc1.weight": (8, 4), "mlp.linear_fc2.weight": (4, 4)}
    shapes = {"embedding.word_embeddings.weight": (6, 4)}
    for number in range(layers):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    rank = {"args": args, "checkpoint_version": 3.0, "iteration": 4,
            "model": collections.OrderedDict((name, Tensor(*shape)) for name, shape in shapes.items())}
    if optimizer:
        matrices_first = sorted(shapes.values(), key=len, reverse=True)
        states = {i: {"step": Tensor(), "exp_avg": Tensor(*shape), "exp_avg_sq": Tensor(*shape)}
                  for i, shape in enumerate(matrices_first)}
        matrices = len(shapes) - layers
        groups = [{"wd_mult": float(decay > 0), "lr_mult": 1.0, "lr": 0.01, "weight_decay": decay, "params": params}
                  for decay, params in [(0.1, list(range(matrices))), (0.0, list(range(matrices, len(shapes))))]]
        rank["optimizer"] = {"state": states, "param_groups": groups}
    return rank


def main():
    folder = pathlib.Path(sys.argv[1])
    inputs = {
        "fuzz_patterns/all_keys": json.dumps(ALL_KEYS).encode(),
        "fuzz_patterns/empty": b'{"version": 1, "family": "x", "note": "", "requires": [], "rules": []}',
        "fuzz_catalogue/empty": catalogue("deepspeed", []),
        "fuzz_catalogue/deepspeed": catalogue("deepspeed", [MODEL]),
        "fuzz_catalogue/form1": catalogue("deepspeed", [MODEL], form=1),
        "fuzz_catalogue/form3": catalogue("deepspeed", [MODEL], form=3),
        "fuzz_catalogue/universal": catalogue("universal", [(b"zero/w/fp32.pt", b"\x80\x02}.", [b"four", b"more"])]),
        "fuzz_dtensor/empty": two_pickles(b"\x80\x02}.", b"\x80\x02}."),
        "fuzz_dtensor/one_rank": two_pickles(*(stored(ONE_RANK / f"{item}_world_size_1_rank_0.pt")[1] for item in ("model", "optim"))),
        "fuzz_megatron/metadata": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
                                  b'"common_backend_version": 1}',
        "fuzz_megatron/empty": two_pickles(b"\x80\x02}.", b"\x80\x02}."),
        "fuzz_megatron/legacy": two_pickles(torch_pickle(legacy_rank()), b""),
        "fuzz_megatron/no_layer": two_pickles(small_pickle(legacy_rank(layers=0)), b""),
        "fuzz_megatron/no_optimizer": two_pickles(small_pickle(legacy_rank(optimizer=False)), b""),
        "fuzz_dtensor/one_tensor": two_pickles(*(pickled for pickled, _ in one_tensor())),
        "fuzz_dtensor/no_optimizer": two_pickles(one_tensor()[0][0], b""),
        "fuzz_dtensor/plain": two_pickles(plain_tensor()[0], b""),
        "fuzz_catalogue/small_deepspeed": catalogue("deepspeed", small_deepspeed()),
        "fuzz_catalogue/small_dtensor": catalogue("dtensor", [
            container(b"model_world_size_1_rank_0.pt", one_tensor()[0])], tag=b"actor"),
        "fuzz_catalogue/small_megatron": catalogue("megatron", [container(
            b"mp_rank_00/model_optim_rng.pt", torch_dumps(legacy_rank(layers=0)))], tag=b"iter_0000004"),
        "fuzz_catalogue/small_safetensors": catalogue("safetensors", [
            (b"model.safetensors", json.dumps(WEIGHT).encode(), [bytes(8)])], tag=b"m", keys=[b"w"]),
        "fuzz_catalogue/demo": catalogue("deepspeed", [stored(path) for path in sorted(DEMO.glob("*/*.pt"))]),
    }
    for name, content in MAPS.items():
        inputs["fuzz_maps/" + name] = json.dumps(content).encode()
    for name, content in inputs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
