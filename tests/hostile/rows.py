# SPDX-License-Identifier: Apache-2.0
"""Sources of the formats other than DeepSpeed's: one row for each form that their trainers save, the
files of a row as objects that can be changed, and the rules for every conversion of them."""

import io
import pickle
import shutil
import threading
import zipfile

import megatron_checkpoint
import ptfile
import zstd
from harness import DATA, expect, succeed, tree

INDEX = ".metadata"
REFUSED = (3, 4, 8, 9)


class Row:
    """One source, and its conversion."""

    def __init__(self, bench, name, origin, *flags):
        self.bench, self.name, self.origin, self.flags = bench, name, origin, (*flags, "--threads", "2")
        self.files = sorted(path.relative_to(origin) for path in origin.rglob("*") if path.is_file())
        source = self.copy()
        done, output = bench.convert(source, f"{name}: the sound source", self.flags)
        expect(done.code == 0, f"{name}: the sound source: {done}")
        self.wanted = self.without_manifest(output)
        shutil.rmtree(source.parent)

    @staticmethod
    def without_manifest(output):
        found = tree(output)
        found.pop("shardwright.json")
        return found

    def copy(self):
        return shutil.copytree(self.origin, self.bench.place() / "ckpt", copy_function=shutil.copyfile)

    def judge(self, group, what, harm, words=(), codes=REFUSED, may_pass=False, may_differ=False):
        """Converts a copy that `harm` has changed. It must be rejected with a code of `codes` and `words`;
        with `may_pass` it may also give what the sound source gives, with `may_differ` anything."""
        source = self.copy()
        harm(source)
        what = f"{self.name}: {what}"
        done, output = self.bench.convert(source, what, self.flags)
        self.settle(group, what, done, output, words, codes, may_pass, may_differ)
        self.bench.nothing_escaped(source, what)
        shutil.rmtree(source.parent)

    def settle(self, group, what, done, output, words, codes, may_pass, may_differ):
        if done.code != 0:
            expect(done.code in codes, f"{what}: exit code {sorted(codes)} expected: {done}")
            for word in words:
                expect(str(word) in done.stderr, f"{what}: \"{word}\" not in the message: {done}")
            self.bench.count(f"{group}, refused")
            return
        expect(may_pass or may_differ, f"{what}: accepted")
        same = self.without_manifest(output) == self.wanted
        expect(same or may_differ, f"{what}: accepted, but the output differs")
        self.bench.count(f"{group}, " + ("harmless" if same else "changed value accepted"))


class Index:
    """The index of a DCP folder, as an object that can be changed and written again."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / INDEX
        self.root = ptfile.Reader(io.BytesIO(self.path.read_bytes()), {}).load()

    @property
    def tensors(self):
        return self.root.state["state_dict_metadata"]

    @property
    def places(self):
        return self.root.state["storage_data"]

    def places_of(self, name):
        return [(key, place) for key, place in self.places.items() if key.state["fqn"] == name]

    def a_tensor(self):
        """\\returns the name of a tensor of two dimensions or more with most boxes"""
        def boxes(name):
            state = self.tensors[name].state or {}
            size = state["size"].args[0] if "size" in state else ()
            return len(state.get("chunks", ())) if len(size) > 1 else 0
        return max(self.tensors, key=boxes)

    def save(self):
        self.path.write_bytes(ptfile.dumps(self.root)[0])

    def replace_item(self, place, data):
        """Other bytes in the place of an item; the items after it move."""
        state = place.state
        if state.get("transform_descriptors"):
            data = zstd.compress(data)
        file = self.folder / state["relative_path"]
        first, count = state["offset"], state["length"]
        whole = file.read_bytes()
        file.write_bytes(whole[:first] + data + whole[first + count:])
        for other in {id(other): other for other in self.places.values()}.values():
            if other.state["relative_path"] == state["relative_path"] and other.state["offset"] > first:
                other.state["offset"] += len(data) - count
        state["length"] = len(data)
        self.save()

    def item(self, place):
        state = place.state
        data = (self.folder / state["relative_path"]).read_bytes()[state["offset"]:state["offset"] + state["length"]]
        return zstd.decompress(data) if state.get("transform_descriptors") else data


def indexes(source):
    """Folders of a source that have an index."""
    return sorted(path.parent for path in source.rglob(INDEX))


def is_archive(path):
    return path.is_file() and zipfile.is_zipfile(path) and path.suffix in (".pt", ".bin")


def payload_of(path):
    """\\returns the pickle of a file of torch.save, its storages"""
    with zipfile.ZipFile(path) as archive:
        folder = archive.namelist()[0].split("/")[0]
        return (archive.read(f"{folder}/data.pkl"),
                {name.rsplit("/", 1)[1]: archive.read(name)
                 for name in archive.namelist() if name.startswith(folder + "/data/")})


# --- places in object graphs ---------------------------------------------------------------------


def places(obj, path=(), seen=None, depth=0):
    """Every place in an object graph as (path, kind): kinds take numbers and dotted names as equal."""
    seen = set() if seen is None else seen
    if depth > 14 or id(obj) in seen:
        return
    inner = []
    if isinstance(obj, dict):
        seen.add(id(obj))
        for number, (key, value) in enumerate(obj.items()):
            if isinstance(key, ptfile.Object):
                inner += [(("value at", number), value), (("key", number), key)]
            else:
                inner.append((("value", key), value))
    elif isinstance(obj, (list, tuple)):
        inner = [(("item", number), value) for number, value in enumerate(obj)]
    elif isinstance(obj, ptfile.Object):
        seen.add(id(obj))
        inner = [(("args", None), obj.args)] + ([(("state", None), obj.state)] if obj.state is not None else [])
    for step, value in inner:
        yield (*path, step)
        yield from places(value, (*path, step), seen, depth + 1)


def kind_of(path):
    def word(step):
        what, key = step
        named = isinstance(key, str) and "." not in key and "/" not in key
        return what, key if named else "#"
    return tuple(word(step) for step in path)


def replaced(obj, path, value):
    """\\returns the graph with `value` at a place; containers are changed in place, tuples copied"""
    if not path:
        return value
    (what, key), rest = path[0], path[1:]
    if what == "value":
        obj[key] = replaced(obj[key], rest, value)
    elif what == "value at":
        key = list(obj)[key]
        obj[key] = replaced(obj[key], rest, value)
    elif what == "key":
        items = list(obj.items())
        other = replaced(items[key][0], rest, value)
        items[key] = (() if isinstance(other, (list, dict)) else other, items[key][1])
        obj.clear()
        obj.update(items)
    elif what == "item":
        items = list(obj)
        items[key] = replaced(items[key], rest, value)
        if isinstance(obj, list):
            obj[:] = items
        else:
            obj = tuple(items)
    elif what == "args":
        obj.args = replaced(obj.args, rest, value)
    else:
        obj.state = replaced(obj.state, rest, value)
    return obj


# --- rows ----------------------------------------------------------------------------------------


def without_manifests(folder):
    for path in folder.rglob("shardwright.json"):
        path.unlink()
    return folder


def torch_dist(load, folder, experts=False, target="pp=2"):
    """\\returns a torch_dist folder with Megatron's names"""
    base = megatron_checkpoint.native(folder / "base", experts)
    succeed([load, base, folder / "made", "--format", "megatron", "--target", target])
    shutil.rmtree(base)
    return without_manifests(folder / "made")


def made(load, folder, origin, *flags):
    succeed([load, origin, folder, *flags])
    return without_manifests(folder)


LOCK = threading.Lock()


def rows(bench):
    """Made once for a bench."""
    with LOCK:
        if bench.rows is None:
            bench.rows = make_rows(bench)
    return bench.rows


def make_rows(bench):
    place = bench.place()
    dcp, dtensor = DATA / "dcp", DATA / "dtensor"
    pair = made(bench.load, place / "pair", dtensor / "accelerate_w2" / "ckpt", "--format", "dcp", "--flavour",
                "accelerate", "--target", "dp_shard=3")
    table = made(bench.load, place / "table", dtensor / "fsdp_w3" / "ckpt", "--format", "dtensor", "--trainer",
                 "torch_checkpointing", "--target", "dp_shard=2")
    to_dcp = ("--format", "dcp", "--target", "dp_shard=2")
    to_dtensor = ("--format", "dtensor", "--target", "dp_shard=2")
    to_zero = ("--format", "deepspeed", "--target", "zero=2,dp=2")
    (place / "dense").mkdir()
    (place / "experts").mkdir()
    found = [
        ("dcp nested", dcp / "nested_w3" / "ckpt", *to_dcp),
        ("dcp flat", dcp / "flat_w2" / "ckpt", *to_zero),
        ("dcp strided", dcp / "strided_w1" / "ckpt", "--format", "safetensors"),
        ("dcp compressed", dcp / "zstd_w2" / "ckpt", *to_dcp),
        ("dcp pair", pair, *to_dtensor),
        ("dtensor fsdp", dtensor / "fsdp_w3" / "ckpt", *to_dtensor),
        ("dtensor hsdp", dtensor / "hsdp_w4" / "ckpt", *to_dcp),
        ("dtensor fsdp x tp", dtensor / "fsdp2_tp2_w4" / "ckpt", "--format", "dcp", "--target", "dp_shard=3,tp=1"),
        ("dtensor fsdp1", dtensor / "flat_w2" / "ckpt", *to_dcp),
        ("dtensor accelerate", dtensor / "accelerate_w2" / "ckpt", *to_zero),
        ("dtensor old", dtensor / "old_fsdp_w3" / "ckpt", *to_dtensor),
        ("dtensor table", table, *to_dcp),
        ("megatron dense", torch_dist(bench.load, place / "dense"), "--format", "megatron", "--target", "pp=4"),
        ("megatron experts", torch_dist(bench.load, place / "experts", True, "ep=2,dp=2"), *to_dcp),
        ("megatron legacy", megatron_checkpoint.legacy(place / "legacy"), "--format", "megatron", "--target", "pp=2"),
    ]
    return [Row(bench, *row) for row in found]


def pickled(value):
    return pickle.dumps(value, 2)
