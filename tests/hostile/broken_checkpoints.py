# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sound archives and pickles that do not fit together."""

import collections
import json
import math
import os
import shutil
import struct

import bench as at
import broken_files
import ptfile
from harness import DEMO, expect, run, tree

HUGE = 1 << 62


def edited(bench, path_of, edit, rank=None):
    """\\returns a copy of the demo with one file's object changed"""
    source = bench.demo()
    path = path_of(source) if rank is None else path_of(source, rank)
    obj = ptfile.load(path)
    edit(obj)
    ptfile.save(path, obj)
    return source, path


def floats(count, value=0.0):
    return ptfile.tensor("FloatStorage", struct.pack("<f", value) * count, (count,), 4)


def scalar(value):
    return ptfile.tensor("FloatStorage", struct.pack("<f", value), (), 4)


def state(obj):
    return obj["optimizer_state_dict"]


def moments(obj, group=0):
    return state(obj)["base_optimizer_state"]["state"][group]


def put(target, key, value):
    target[key] = value


def reshape(tensor, shape=None, strides=None, offset=None):
    """Changes the arguments that rebuild a tensor."""
    arguments = list(tensor.args)
    if offset is not None:
        arguments[1] = offset
    if shape is not None:
        arguments[2] = shape
    if strides is not None:
        arguments[3] = strides
    tensor.args = tuple(arguments)


def rename(mapping, old, new):
    """Keeps the order."""
    items = [(new if key == old else key, value) for key, value in mapping.items()]
    mapping.clear()
    mapping.update(items)


OPTIM_EDITS = [
    # change, edit, words of the message
    ("masters too short", lambda o: put(state(o)["single_partition_of_fp32_groups"], 0, floats(3051)),
     ["3051"]),
    ("masters too long", lambda o: put(state(o)["single_partition_of_fp32_groups"], 1, floats(201)),
     ["group 1"]),
    ("moment too short", lambda o: put(moments(o), "exp_avg", floats(3051)),
     ["exp_avg", "3051", "3052"]),
    ("moment is a number", lambda o: put(moments(o), "exp_avg_sq", 3), ["group 0", "1", "2"]),
    ("moment missing", lambda o: moments(o).pop("exp_avg_sq"),
     ["group 0", "1", "2"]),
    ("other step", lambda o: put(moments(o), "step", scalar(6.0)), ["step", "6", "5"]),
    ("no state for a group", lambda o: state(o)["base_optimizer_state"]["state"].pop(1), []),
    ("one group fewer", lambda o: state(o)["base_optimizer_state"]["param_groups"].pop(), []),
    ("one master fewer", lambda o: state(o)["single_partition_of_fp32_groups"].pop(), []),
    ("group says other parameters",
     lambda o: put(state(o)["base_optimizer_state"]["param_groups"][0], "params", [0, 1]), []),
    ("masters missing", lambda o: state(o).pop("single_partition_of_fp32_groups"),
     ["single_partition_of_fp32_groups"]),
    ("base state missing", lambda o: state(o).pop("base_optimizer_state"), ["optimizer state"]),
    ("base state is a text", lambda o: put(state(o), "base_optimizer_state", "x"),
     ["optimizer state", "string"]),
    ("optimizer state is a list", lambda o: put(o, "optimizer_state_dict", [1]),
     ["optimizer_state_dict"]),
    ("optimizer state missing", lambda o: o.pop("optimizer_state_dict"), ["optimizer_state_dict"]),
    ("other stage", lambda o: put(state(o), "zero_stage", 1), ["stage"]),
    ("stage 9", lambda o: put(state(o), "zero_stage", 9), ["9"]),
    ("stage is a text", lambda o: put(state(o), "zero_stage", "two"), ["zero_stage"]),
    ("partition_count of 3", lambda o: put(state(o), "partition_count", [3, 3]), ["rank_2"]),
    ("partition_count of 0", lambda o: put(state(o), "partition_count", [0, 0]), ["by 0"]),
    ("partition_count of -1", lambda o: put(state(o), "partition_count", [-1, -1]), ["-1"]),
    ("partition_count of 2^62", lambda o: put(state(o), "partition_count", [HUGE, HUGE]),
     [str(HUGE)]),
    ("partition_count is a text", lambda o: put(state(o), "partition_count", "2"),
     ["partition_count"]),
    ("strides beyond the storage",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], strides=(2,)), []),
    ("extent of 2^62",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], shape=(HUGE,)), []),
    ("extents whose product overflows",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], shape=(1 << 32, 1 << 32, 5),
                       strides=(1, 1, 1)), []),
    ("negative extent",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], shape=(-3052,)), []),
    ("negative offset",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], offset=-1), []),
    ("offset of 2^63 - 1",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], offset=(1 << 63) - 1), []),
    ("number that has no end",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], shape=(1 << 4000,)), []),
    ("strides fewer than extents",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], strides=()), []),
    ("65 dimensions",
     lambda o: reshape(state(o)["single_partition_of_fp32_groups"][0], shape=(1,) * 64 + (3052,),
                       strides=(1,) * 65), []),
    ("half the element count", lambda o: put(
        state(o)["single_partition_of_fp32_groups"][0].args[0].__dict__, "elements", 1526), []),
    ("element count of 2^62", lambda o: put(
        state(o)["single_partition_of_fp32_groups"][0].args[0].__dict__, "elements", HUGE), []),
    ("masters in float16", lambda o: put(
        state(o)["single_partition_of_fp32_groups"], 0,
        ptfile.tensor("HalfStorage", bytes(2 * 3052), (3052,), 2)), []),
]


def shapes(obj, group=0):
    return obj["param_shapes"][group]


MODEL_EDITS = [
    ("shape that the partitions do not hold",
     lambda o: put(shapes(o), "embedding.weight", ptfile.size(48, 18)), ["embedding.weight"]),
    ("shapes that the partitions do not fill",
     lambda o: shapes(o).pop("layers.1.narrow.weight"), []),
    ("shape of 2^62 rows", lambda o: put(shapes(o), "embedding.weight", ptfile.size(HUGE, 18)), []),
    ("negative shape", lambda o: put(shapes(o), "embedding.weight", ptfile.size(-47, 18)), []),
    ("shape is a text", lambda o: put(shapes(o), "embedding.weight", "47x18"),
     ["embedding.weight"]),
    ("weight of another shape",
     lambda o: reshape(o["module"]["layers.0.widen.weight"], shape=(18, 37), strides=(37, 1)),
     ["layers.0.widen.weight", "37", "18"]),
    ("weight missing", lambda o: o["module"].pop("layers.0.widen.weight"),
     ["layers.0.widen.weight"]),
    ("weight that nobody knows",
     lambda o: put(o["module"], "surprise", floats(7)), ["surprise"]),
    ("param_shapes missing", lambda o: o.pop("param_shapes"), ["param_shapes"]),
    ("param_shapes is a number", lambda o: put(o, "param_shapes", 7), ["param_shapes"]),
    ("one group of shapes fewer", lambda o: o["param_shapes"].pop(), []),
    ("a parameter twice",
     lambda o: put(shapes(o, 1), "embedding.weight", ptfile.size(47, 18)), ["embedding.weight"]),
    ("module missing", lambda o: o.pop("module"), ["module"]),
    ("module is a list", lambda o: put(o, "module", []), ["module"]),
    ("dp_world_size of 3", lambda o: put(o, "dp_world_size", 3), ["3", "2"]),
    ("dp_world_size of 10^9", lambda o: put(o, "dp_world_size", 10**9), []),
    ("dp_world_size of -1", lambda o: put(o, "dp_world_size", -1), []),
    ("dp_world_size is a text", lambda o: put(o, "dp_world_size", "2"), ["dp_world_size"]),
    ("mp_world_size of 2", lambda o: put(o, "mp_world_size", 2), ["2"]),
    ("tied to nothing", lambda o: put(o["shared_params"], "head.weight", "nobody"), ["nobody"]),
    ("tied to itself", lambda o: put(o["shared_params"], "head.weight", "head.weight"),
     ["head.weight"]),
    ("tied in a ring", lambda o: o["shared_params"].update(
        {"head.weight": "tail", "tail": "head.weight"}), []),
    ("frozen without bytes", lambda o: o["frozen_param_fragments"].clear(), ["position"]),
    ("frozen of another shape",
     lambda o: put(o["frozen_param_shapes"], "position", ptfile.size(9, 19)), ["position"]),
    ("buffer that is not there", lambda o: o["buffer_names"].append("ghost"), ["ghost"]),
    ("buffer names is a number", lambda o: put(o, "buffer_names", 3), ["buffer_names"]),
]


# Detected only in the whole checkpoint, not in one file.
OF_ALL = {"partition_count of 3", "partition_count of 0", "partition_count of 2^62"}

# Values that other parts of the checkpoint repeat, and that are computed again: an error, or the
# output must be the sound one.
REDUNDANT = {"param_shapes missing", "dp_world_size of 3", "frozen without bytes",
             "frozen of another shape"}

# Values that nothing converted depends on, but that may be carried along: accepted or refused, both
# fine, as long as the run ends well.
EITHER = {"weight that nobody knows", "group says other parameters", "mp_world_size of 2", "tied in a ring", "tied to itself",
          "buffer that is not there", "buffer names is a number", "tied to nothing",
          "dp_world_size of 10^9", "dp_world_size of -1", "dp_world_size is a text"}


def checkpoint_jobs(bench):
    jobs = []

    def one(what, edit, words, path_of, rank):
        source, path = edited(bench, path_of, edit, rank)
        if what in EITHER:
            done, _ = bench.convert(source, what)
            bench.count("contradictions, " + ("of no effect" if done.code == 0 else "refused"))
            return
        if what in REDUNDANT:
            bench.refused_or_harmless(source, what, [path.name], "contradictions", (4, 9))
            return
        name = "global_step5" if what in OF_ALL else path.name if path_of is at.optim else ".pt"
        codes = (3, 4, 8, 9) if what in OF_ALL else (4, 8, 9)
        bench.refused(source, what, [*words, name], codes, group="contradictions, refused")

    for what, edit, words in OPTIM_EDITS:
        jobs.append(lambda w=what, e=edit, t=words: one(w, e, t, at.optim, 0))
    for what, edit, words in MODEL_EDITS:
        jobs.append(lambda w=what, e=edit, t=words: one(w, e, t, at.model, None))
    jobs += [lambda: missing(bench, at.optim), lambda: missing(bench, lambda s: at.optim(s, 1)),
             lambda: missing(bench, at.model), lambda: nan_padding(bench)]
    return jobs


def missing(bench, path_of):
    source = bench.demo()
    path = path_of(source)
    path.unlink()
    bench.refused(source, f"{path.name} missing", [path.name], (3, 4), group="files missing, refused")


def nan_padding(bench):
    """ZeRO-3 pads every parameter to a multiple of the ranks. No reader uses the bytes of the padding."""
    place = bench.place()
    ranks = 4
    padded = place / "padded"
    done = run([bench.load, DEMO, padded, "--target", f"zero=3,dp={ranks}"])
    expect(done.code == 0, f"padded: {done}")
    target = ["--target", "zero=1,dp=2"]
    done = run([bench.load, padded, place / "before", *target])
    expect(done.code == 0, f"from padded: {done}")
    last = ranks - 1
    step = at.tag_folder(padded)
    model = ptfile.load(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    path = step / f"bf16_zero_pp_rank_{last}_mp_rank_00_optim_states.pt"
    shard = ptfile.load(path)
    inner = state(shard)
    flat = inner["fp32_flat_groups"]
    changed = 0
    bad = struct.pack("<f", math.nan)
    for group, (tensor, of_group) in enumerate(zip(flat, model["param_shapes"])):
        entries = inner["optimizer_state_dict"]["state"][group]
        for each in (tensor, entries["exp_avg"], entries["exp_avg_sq"]):
            storage = each.args[0]
            data = bytearray(storage.data)
            at_elem = each.args[1]
            for shape in of_group.values():
                count = math.prod(shape.args[0])
                own = -(-count // ranks)
                pads = min(own, own * ranks - count)
                first = at_elem + own - pads
                data[4 * first:4 * (first + pads)] = bad * pads
                changed += pads
                at_elem += own
            storage.data = bytes(data)
    expect(changed > 100, f"only {changed} padding elements")
    ptfile.save(path, shard)
    done = run([bench.load, padded, place / "after", *target])
    expect(done.code == 0, f"NaN in padding: {done}")
    before, after = tree(place / "before"), tree(place / "after")
    before.pop("shardwright.json")
    after.pop("shardwright.json")
    expect(before == after, "padding came through")
    bench.count("NaN in padding, no effect")
    shutil.rmtree(place)


# --- names ---------------------------------------------------------------------------------------


NAMES = ["../../escaped", "/tmp/escaped", "a/../../escaped", "..", ".", "", "a\0b", "a\nb", "a/b",
         "a\\b", "~", "-rf", "CON", "x" * 300, "y" * 70000, "\u202egnp", "{rank}", "%s%n", "embedding"]


def name_jobs(bench):
    def job(name):
        what = f"parameter named {name[:30]!r}"
        source = bench.demo()
        path = at.model(source)
        obj = ptfile.load(path)
        for mapping in (obj["module"], obj["param_shapes"][0], obj["shared_params"]):
            rename(mapping, "embedding.weight", name)
        obj["shared_params"]["head.weight"] = name
        ptfile.save(path, obj)
        for rank in (0, 1):
            shard = ptfile.load(at.optim(source, rank))
            rename(state(shard)["param_slice_mappings"][0], "embedding.weight", name)
            ptfile.save(at.optim(source, rank), shard)
        before = set(os.listdir(source.parent))
        for program, flags in ((bench.union, ()), (bench.load, at.TARGET)):
            output = source.parent / "out"
            done = bench.attempt([program, source, output, *flags], output, what)
            made = set(os.listdir(source.parent)) - before
            expect(made <= {"out"}, f"{what}: made {made}")
            for escaped in (bench.folder, source.parent, source):
                expect(not (escaped / "escaped").exists(), f"{what}: became a path")
            expect(not os.path.exists("/tmp/escaped"), f"{what}: became a path")
            if done.code == 0:
                expect((output / "latest").exists() or (output / "latest_universal").exists(),
                       f"{what}: {done}")
                again = run([bench.load, "--check", source, output])
                expect(again.code == 0, f"{what}: accepted, but not the same: {again}")
                shutil.rmtree(output)
            else:
                expect(done.code in (4, 8, 9), f"{what}: {done}")
                expect("\0" not in done.stderr and "\u202e" not in done.stderr
                       and len(done.stderr) < 4000, f"{what}: shown raw: {done}")
            bench.count("names, " + ("kept" if done.code == 0 else "refused"))
        shutil.rmtree(source.parent)

    return [lambda n=name: job(n) for name in NAMES]


# --- atoms and catalogues --------------------------------------------------------------------------


def other_jobs(bench):
    place = bench.place()
    atoms = place / "atoms"
    done = run([bench.union, DEMO, atoms])
    expect(done.code == 0, f"atoms: {done}")
    (atoms / "shardwright.json").unlink()  # a changed file that it lists is an error before a reader parses it
    catalogue = place / "catalogue"
    done = run([bench.extract, DEMO, catalogue, "--pack=copy"])
    expect(done.code == 0, f"catalogue: {done}")
    tag = (atoms / "latest_universal").read_text().strip()
    done = run([bench.load, atoms, place / "check", *at.TARGET])
    expect(done.code == 0, f"from atoms: {done}")

    def broken(what, origin, harm, words, codes=(3, 4, 8, 9), harmless=False):
        source = shutil.copytree(origin, bench.place() / "ckpt")
        harm(source)
        if harmless:
            done, _ = bench.convert(source, what)
            bench.count("atoms and catalogues, "
                        + ("harmless" if done.code == 0 else "refused"))
            return
        bench.refused(source, what, words, codes, group="atoms and catalogues, refused")

    jobs = []

    def atom(source, name="fp32.pt", param="embedding.weight"):
        return source / tag / "zero" / param / name

    def cut(path):
        path.write_bytes(path.read_bytes()[:-30])

    def flipped(path, position):
        data = bytearray(path.read_bytes())
        data[position] ^= 4
        path.write_bytes(data)

    def payload(path):
        """Position of the middle of the largest member."""
        _, first, count = max(broken_files.members(path), key=lambda member: member[2])
        return first + count // 2

    def wrong_shape(path):
        obj = ptfile.load(path)
        tensor = obj["param"] if isinstance(obj, dict) else obj
        data = bytes(4 * 46 * 18)
        put_in = ptfile.tensor("FloatStorage", data, (46, 18), 4)
        if isinstance(obj, dict):
            obj["param"] = put_in
            ptfile.save(path, obj)
        else:
            ptfile.save(path, put_in)
        return tensor

    for name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
        words = ["embedding.weight", name]
        jobs += [
            lambda n=name, w=words: broken(f"{n} cut", atoms, lambda s: cut(atom(s, n)), w),
            lambda n=name, w=words: broken(f"{n} gone", atoms, lambda s: atom(s, n).unlink(), w[:1]),
            lambda n=name, w=words: broken(f"{n} flipped", atoms, lambda s: flipped(
                atom(s, n), payload(atom(s, n))), w, (4,)),
            lambda n=name, w=words: broken(f"{n} empty", atoms,
                                           lambda s: atom(s, n).write_bytes(b""), w),
            lambda n=name, w=words: broken(f"{n} of another shape", atoms,
                                           lambda s: wrong_shape(atom(s, n)), w[:1]),
            lambda n=name, w=words: broken(f"{n} is a folder", atoms, lambda s: (
                atom(s, n).unlink(), atom(s, n).mkdir()), w[:1]),
        ]
    jobs.append(lambda: broken("a parameter gone", atoms,
                               lambda s: shutil.rmtree(atom(s).parent), ["embedding.weight"]))

    def escaping_tag(flags):
        """A conversion gives the folder its name without `_universal`."""
        what = f"atoms in .._universal {flags}"
        source = shutil.copytree(atoms, bench.place() / "ckpt")
        (source / tag).rename(source / ".._universal")
        (source / "latest_universal").write_text(".._universal")
        before = tree(source.parent)
        done, _ = bench.convert(source, what, flags)
        expect(done.code == 4 and "\"..\"" in done.stderr, f"{what}: {done}")
        expect(tree(source.parent) == before, f"{what}: something was written")
        bench.count("atoms and catalogues, refused")

    jobs += [lambda f=flags: escaping_tag(f) for flags in (at.TARGET, ("--target", "dp=2"))]
    described = [path.relative_to(atoms) for path in atoms.rglob("shardwright_atoms.json")]
    expect(len(described) == 1, "one description of the atoms")
    path_in = described[0]
    jobs += [
        lambda: broken("description is no JSON", atoms,
                       lambda s: (s / path_in).write_text("{"), ["shardwright_atoms.json"]),
        lambda: broken("description is a list", atoms,
                       lambda s: (s / path_in).write_text("[]"), ["shardwright_atoms.json"]),
        lambda: broken("description is empty", atoms,
                       lambda s: (s / path_in).write_text("{}"), ["shardwright_atoms.json"]),
        lambda: broken("description nests", atoms,
                       lambda s: (s / path_in).write_text("[" * 500000), ["shardwright_atoms.json"]),
    ]

    def paths_of(value, at_path=()):
        """Every place in a JSON value."""
        yield at_path
        items = value.items() if isinstance(value, dict) else \
            enumerate(value[:3]) if isinstance(value, list) else ()
        for key, inner in items:
            yield from paths_of(inner, (*at_path, key))

    sound = json.loads((atoms / path_in).read_text())
    places = [place for place in paths_of(sound) if 0 < len(place) <= 4]
    kinds = collections.OrderedDict()
    for place_in in places:  # one of each kind of place is enough
        kinds.setdefault(tuple("#" if isinstance(word, int) or "." in word else word
                               for word in place_in), place_in)

    def spoil(source, where, value):
        obj = json.loads((source / path_in).read_text())
        inner = obj
        for word in where[:-1]:
            inner = inner[word]
        inner[where[-1]] = value
        (source / path_in).write_text(json.dumps(obj))

    for where in kinds.values():
        for value in (None, -1, HUGE, "../x", [], {}, [[]], 1.5):
            jobs.append(lambda w=where, v=value: broken(
                f"description: {w} = {v!r}", atoms, lambda s: spoil(s, w, v), [], harmless=True))
    size = (catalogue / "catalogue.swc").stat().st_size
    for length in (0, 1, 10, size // 2, size - 1):
        jobs.append(lambda n=length: broken(
            f"catalogue cut to {n}", catalogue, lambda s: (s / "catalogue.swc").write_bytes(
                (s / "catalogue.swc").read_bytes()[:n]), ["catalogue.swc"]))
    for position in range(0, size, max(1, size // 40)):
        jobs.append(lambda p=position: broken(
            f"catalogue flipped at {p}", catalogue, lambda s: flipped(s / "catalogue.swc", p),
            ["catalogue.swc"]))
    for path in sorted((catalogue / "pack").iterdir()):
        jobs += [
            lambda n=path.name: broken(f"{n} cut", catalogue, lambda s: cut(s / "pack" / n), [n]),
            lambda n=path.name: broken(f"{n} gone", catalogue,
                                       lambda s: (s / "pack" / n).unlink(), [n]),
        ]
    jobs.append(lambda: broken("packed bytes flipped", catalogue, lambda s: flipped(
        s / "pack" / "000000.bin", 5000), [], (4,)))
    jobs.append(lambda: broken("catalogue without manifest", catalogue,
                               lambda s: (s / "shardwright.json").unlink(), ["shardwright.json"]))
    jobs.append(lambda: broken("catalogue with another manifest", catalogue, lambda s:
                               (s / "shardwright.json").write_text('{"kind": 7}'),
                               ["shardwright.json"]))
    return jobs
