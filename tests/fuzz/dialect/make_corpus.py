#!/usr/bin/env python3
"""Writes the seed inputs of the dialect fuzz targets: make_corpus.py FOLDER. Same bytes every time.

Catalogues are stored as their form, a byte, and what they hold when unpacked: that of the demo checkpoint, and small
ones.
"""

import argparse
import collections
import io
import json
import pathlib
import pickle
import sys
import types
import zipfile

ONE_RANK = pathlib.Path(__file__).resolve().parents[2] / "data" / "dtensor" / "fsdp_w1" / "ckpt"
DEMO = pathlib.Path(__file__).resolve().parents[2] / "data" / "demo"
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


def catalogue(dialect, files, form=4):
    """files: (name, pickle, [payload]); payloads lie one after the other, small ones are inlined. The form comes first."""
    out = number(["deepspeed", "universal"].index(dialect)) if form < 3 else text(dialect.encode())
    out += text(b"global_step1") + number(1) + text(b"a warning") + text(b"") + number(len(files))
    for index, (name, pickle, payloads) in enumerate(files):
        size = sum(map(len, payloads)) + 1
        out += text(name) + text(b"/source/" + name) + number(size) + number(2) + number(7)
        if form >= 3:  # one container; in form 4 its skeleton is a new one; a pickle, from the beginning
            out += number(1) + (number(index) if form == 4 else b"") + number(0) + number(0)
        out += number(size) + text(pickle) + number(len(payloads))
        for payload in payloads:
            out += number(KEY_IS_INDEX | HAS_SUM) + number(0) + number(len(payload)) + b"\x01\x02\x03\x04"
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
    """Where the second one begins, then both."""
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
        self.count = 0
        for module, kind, name, stands_for in [("torch", Storage, "FloatStorage", Storage),
                                               ("torch._utils", rebuild_tensor, "_rebuild_tensor_v2", rebuild_tensor)]:
            kind.__module__, kind.__qualname__ = module, name
            sys.modules.setdefault(module, types.ModuleType(module))
            setattr(sys.modules[module], name, stands_for)

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        self.count += 1
        return ("storage", Storage, str(self.count - 1), "cpu", value.elements)


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


def torch_pickle(value):
    out = io.BytesIO()
    Pickler(out, 2).dump(value)
    return out.getvalue()


def legacy_rank():
    """A rank of Megatron: two layers of width 4, two heads in one group, a gated MLP, five words padded to six."""
    args = argparse.Namespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, num_layers=2, num_attention_heads=2,
        num_query_groups=1, kv_channels=2, group_query_attention=True, vocab_size=5, make_vocab_size_divisible_by=3,
        consumed_train_samples=48)
    layer = {"input_layernorm.weight": (4,), "self_attention.linear_proj.weight": (4, 4),
             "self_attention.linear_qkv.weight": (8, 4), "mlp.linear_fc1.weight": (8, 4), "mlp.linear_fc2.weight": (4, 4)}
    shapes = {"embedding.word_embeddings.weight": (6, 4)}
    for number in range(2):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    matrices_first = sorted(shapes.values(), key=len, reverse=True)
    states = {i: {"step": Tensor(), "exp_avg": Tensor(*shape), "exp_avg_sq": Tensor(*shape)}
              for i, shape in enumerate(matrices_first)}
    groups = [{"wd_mult": float(decay > 0), "lr_mult": 1.0, "lr": 0.01, "weight_decay": decay, "params": params}
              for decay, params in [(0.1, list(range(9))), (0.0, [9, 10])]]
    return {"args": args, "checkpoint_version": 3.0, "iteration": 4,
            "model": collections.OrderedDict((name, Tensor(*shape)) for name, shape in shapes.items()),
            "optimizer": {"state": states, "param_groups": groups}}


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
