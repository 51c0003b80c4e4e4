# SPDX-License-Identifier: Apache-2.0
"""Indexes and object graphs of the other formats that are sound pickles with impossible content."""

import os
import shutil

import broken_rows
import ptfile
import rows as of
from broken_checkpoints import HUGE, NAMES
from harness import expect, run


def chunks(index, name):
    return index.tensors[name].state["chunks"]


def extents(chunk, key, values):
    """Sets offsets or sizes of a box."""
    chunk.state[key] = ptfile.size(*values)


def of_chunk(chunk, key):
    return list(chunk.state[key].args[0])


def moved(key, at, value):
    """Changes the first box of a tensor in the list and, if its beginning moves, the key of its place."""
    def edit(index, name):
        chunk = chunks(index, name)[0]
        old = of_chunk(chunk, "offsets")
        new = of_chunk(chunk, key)
        new[at] = value(new[at])
        extents(chunk, key, new)
        if key == "offsets":
            for place, _ in index.places_of(name):
                if list(place.state["offset"].args[0]) == old:
                    place.state["offset"] = ptfile.size(*new)
    return edit


def place_of_first(index, name):
    old = of_chunk(chunks(index, name)[0], "offsets")
    return next((key, place) for key, place in index.places_of(name) if list(key.state["offset"].args[0]) == old)


def in_place(key, value):
    def edit(index, name):
        state = place_of_first(index, name)[1].state
        state[key] = value(state[key]) if callable(value) else value
    return edit


def size_of(value):
    def edit(index, name):
        index.tensors[name].state["size"] = ptfile.size(*value(list(index.tensors[name].state["size"].args[0])))
    return edit


def drop_chunk(which):
    def edit(index, name):
        chunk = chunks(index, name)[which]
        key = next(key for key, _ in index.places_of(name)
                   if list(key.state["offset"].args[0]) == of_chunk(chunk, "offsets"))
        del index.places[key]
        chunks(index, name).remove(chunk)
    return edit


def huge_tensor(index, name):
    """A box of 2^50 rows that its item does not have."""
    rest = list(index.tensors[name].state["size"].args[0])[1:]
    first = chunks(index, name)[0]
    key, place = place_of_first(index, name)
    for other, _ in index.places_of(name):
        del index.places[other]
    key.state["offset"] = ptfile.size(*[0] * (len(rest) + 1))
    index.places[key] = place
    index.tensors[name].state["size"] = ptfile.size(1 << 50, *rest)
    extents(first, "offsets", [0] * (len(rest) + 1))
    extents(first, "sizes", [1 << 50, *rest])
    index.tensors[name].state["chunks"] = [first]


def same_box_twice(index, name):
    chunks(index, name).append(chunks(index, name)[0])


def box_of_another_rank(index, name):
    extents(chunks(index, name)[0], "sizes", of_chunk(chunks(index, name)[0], "sizes") + [1])


def no_place(index, name):
    del index.places[place_of_first(index, name)[0]]


def place_without_box(index, name):
    key, place = place_of_first(index, name)
    other = type(key)()
    other.state = {**key.state, "fqn": name + "x"}
    index.places[other] = place


def place_twice(index, name):
    key, place = place_of_first(index, name)
    other, second = type(key)(), type(place)()
    other.state, second.state = dict(key.state), {**place.state, "offset": place.state["offset"] + 1}
    index.places[other] = second


def properties(at, value):
    def edit(index, name):
        one = index.tensors[name].state["properties"]
        state = list(one.state)
        state[at:at + 1] = value
        one.state = tuple(state)
    return edit


def paths(change):
    def edit(index, name):
        planner = index.root.state.get("planner_data")
        if planner:
            change(planner, name)
    return edit


def another_transform(index, name):
    """None for compressed tensors, compression for the others."""
    state = place_of_first(index, name)[1].state
    state["transform_descriptors"] = [] if state.get("transform_descriptors") else ["stream.zstd/1"]


def many_boxes(index, name):
    """A million boxes of no elements."""
    empty = type(chunks(index, name)[0])()
    empty.state = {"offsets": ptfile.size(0, 0), "sizes": ptfile.size(0, 0)}
    chunks(index, name).extend([empty] * 1_000_000)


def constant(name):
    return ptfile.find("torch", name)


# Name, edit(index, name of a tensor with several boxes), and True if it may be accepted as written.
INDEX_EDITS = [
    ("box before its tensor", moved("offsets", 0, lambda _: -1), False),
    ("box beyond its tensor", moved("offsets", 0, lambda at: at + 100), False),
    ("box over another", moved("sizes", 0, lambda rows: rows + 1), False),
    ("box too small", moved("sizes", 0, lambda rows: rows - 1), False),
    ("box of 2^62 rows", moved("sizes", 0, lambda _: HUGE), False),
    ("box of 2^64 rows", moved("sizes", 0, lambda _: 1 << 64), False),
    ("box of -1 rows", moved("sizes", 0, lambda _: -1), False),
    ("box that begins at 2^62", moved("offsets", 0, lambda _: HUGE), False),
    ("box of more dimensions", box_of_another_rank, False),
    ("box twice", same_box_twice, False),
    ("a million empty boxes", many_boxes, False),
    ("first box lost", drop_chunk(0), False),
    ("last box lost", drop_chunk(-1), False),
    ("box without place", no_place, False),
    ("place without box", place_without_box, False),
    ("place twice", place_twice, False),
    ("tensor of 2^50 rows", huge_tensor, False),
    ("tensor of 2^62 rows", size_of(lambda size: [HUGE, *size[1:]]), False),
    ("tensor whose elements overflow", size_of(lambda size: [1 << 40] * len(size)), False),
    ("tensor one row larger", size_of(lambda size: [size[0] + 1, *size[1:]]), False),
    ("tensor one row smaller", size_of(lambda size: [size[0] - 1, *size[1:]]), False),
    ("tensor without dimensions", size_of(lambda size: []), False),
    ("tensor of 65 dimensions", size_of(lambda size: [*size, *[1] * 65]), False),
    ("tensor of negative rows", size_of(lambda size: [-size[0], *size[1:]]), False),
    ("absolute name", in_place("relative_path", "/etc/passwd"), False),
    ("name with ..", in_place("relative_path", "../elsewhere"), False),
    ("..", in_place("relative_path", ".."), False),
    ("name of the folder", in_place("relative_path", "."), False),
    ("no name", in_place("relative_path", ""), False),
    ("name with a folder", in_place("relative_path", "sub/__0_0.distcp"), False),
    ("name with NUL", in_place("relative_path", "__0_0.distcp\0x"), False),
    ("long name", in_place("relative_path", "x" * 5000), False),
    ("name of the index", in_place("relative_path", of.INDEX), False),
    ("name that is not there", in_place("relative_path", "__77_0.distcp"), False),
    ("name that is a number", in_place("relative_path", 7), False),
    ("item at -1", in_place("offset", -1), False),
    ("item at 2^62", in_place("offset", HUGE), False),
    ("item at 2^64 - 1", in_place("offset", (1 << 64) - 1), False),
    ("item one byte on", in_place("offset", lambda at: at + 1), False),
    ("item of -1 bytes", in_place("length", -1), False),
    ("item of no bytes", in_place("length", 0), False),
    ("item of 2^62 bytes", in_place("length", HUGE), False),
    ("item that reaches into the next", in_place("length", lambda count: count + 1), False),
    ("item cut", in_place("length", lambda count: count - 1), False),
    ("another transform", another_transform, False),
    ("unknown transform", lambda index, name: place_of_first(index, name)[1].state.update(
        transform_descriptors=["../../x"]), False),
    ("transforms that are no list", lambda index, name: place_of_first(index, name)[1].state.update(
        transform_descriptors=7), False),
    ("other type", properties(0, [constant("float64")]), False),
    ("type that is none", properties(0, [constant("nothing")]), False),
    ("type that is a text", properties(0, ["torch.float32"]), False),
    ("properties of one value", properties(0, []), False),
    ("sparse", properties(1, [ptfile.find("torch.serialization", "_get_layout")("torch.sparse_coo")]), False),
    ("layout that is a call", properties(1, [ptfile.find("nobody", "knows")("it")]), False),
    ("no boxes", lambda index, name: index.tensors[name].state.update(chunks=[]), False),
    ("boxes that are a text", lambda index, name: index.tensors[name].state.update(chunks="x"), False),
    ("tensors that are a list", lambda index, _: index.root.state.update(state_dict_metadata=[]), False),
    ("places that are a list", lambda index, _: index.root.state.update(storage_data=[]), False),
    ("no tensors at all", lambda index, _: index.tensors.clear(), False),
    ("no places at all", lambda index, _: index.places.clear(), False),
    ("path through a number", paths(lambda planner, name: planner.update({name: (1, 2)})), False),
    ("path that is a text", paths(lambda planner, name: planner.update({name: "model"})), False),
    ("path of another name", paths(lambda planner, name: planner.update({name: ("other", "name")})), False),
    ("path of 10^5 parts", paths(lambda planner, name: planner.update({name: ("a",) * 100_000})), False),
    ("path missing", paths(lambda planner, name: planner.pop(name)), False),
]
WITH_PATHS = {what for what, _, _ in INDEX_EDITS if what.startswith("path ")}


def indexes(bench, thorough):
    jobs = []
    for row in of.rows(bench):
        cases = [(folder.relative_to(row.origin), *edit) for folder in of.indexes(row.origin) for edit in INDEX_EDITS
                 if edit[0] not in WITH_PATHS or of.Index(folder).root.state.get("planner_data")]
        for folder, what, edit, loose in broken_rows.chosen(cases, thorough, 4, row.name):
            jobs.append(lambda r=row, f=folder, w=what, e=edit, m=loose: r.judge(
                "other formats: false indexes", f"{f}: {w}", edited(f, e), may_differ=m))
    return jobs


def edited(folder, edit):
    def harm(source):
        shutil.copy(source / folder / of.INDEX, source.parent / "elsewhere")
        index = of.Index(source / folder)
        edit(index, index.a_tensor())
        index.save()
    return harm


# --- values of other types -------------------------------------------------------------------------


VALUES = (None, -1, HUGE, "../x", "", 1.5, True, (), b"x")


def graph_of(path):
    """\\returns the object graph of a file; what writes it again"""
    if path.name == of.INDEX:
        return of.Index(path.parent).root, lambda root: path.write_bytes(ptfile.dumps(root)[0])
    if path.name == "metadata.pkl":
        with open(path, "rb") as file:
            return ptfile.Reader(file, {}).load(), lambda root: path.write_bytes(of.pickled(root))
    return ptfile.load(path), lambda root: ptfile.save(path, root)


def types(bench, thorough):
    """A value of another type in every kind of place of every kind of file."""
    jobs = []
    for row in of.rows(bench):
        cases = []
        for name in {file.name.split("_rank_")[0].split("_rank")[0]: file for file in row.files}.values():
            path = row.origin / name
            if not of.is_archive(path) and name.name not in (of.INDEX, "metadata.pkl"):
                continue
            kinds = {}
            for at in of.places(graph_of(path)[0]):
                if at[-1][0] != "args":  # a call without a tuple of arguments cannot be written
                    kinds.setdefault(of.kind_of(at), at)
            cases += [(name, at, value) for at in kinds.values()
                      for value in (*VALUES, [], {}, ptfile.find("torch", "float64"))]
        for name, at, value in broken_rows.chosen(cases, thorough, 4, row.name):
            jobs.append(lambda r=row, n=name, a=at, v=value: r.judge(
                "other formats: values of other types", f"{n}: {v!r} at {a}", with_value(n, a, v), may_differ=True))
    return jobs


def with_value(name, at, value):
    def harm(source):
        graph, write = graph_of(source / name)
        # Containers are shared by all cases.
        write(of.replaced(graph, at, type(value)(value) if isinstance(value, (list, dict)) else value))
    return harm


# --- names -----------------------------------------------------------------------------------------


def names(bench, thorough):
    return [lambda w=what, n=name: named(bench, w, n)
            for name in broken_rows.chosen(NAMES, thorough, 3, 1) for what in ("dcp strided", "dtensor accelerate")]


def rename_in_index(source, name):
    index = of.Index(source)
    old, new = "model.w", "model." + name
    index.tensors[new] = index.tensors.pop(old)
    for key, _ in index.places_of(old):
        key.state["fqn"] = new
    planner = index.root.state["planner_data"]
    planner[new] = ("model", name)
    del planner[old]
    index.save()


def rename_in_ranks(source, name):
    old = "head.weight"
    for path in source.glob("*.bin"):
        obj = ptfile.load(path)
        held = obj.get("state", obj)
        held[name] = held.pop(old)
        for group in obj.get("param_groups", ()):
            group["params"] = [name if one == old else one for one in group["params"]]
        ptfile.save(path, obj)


def named(bench, kind, name):
    row = next(row for row in of.rows(bench) if row.name == kind)
    source = row.copy()
    what = f"{kind}: parameter named {name[:30]!r}"
    (rename_in_index if kind.startswith("dcp") else rename_in_ranks)(source, name)
    before = set(os.listdir(source.parent))
    for program, flags in ((bench.union, ()), (bench.load, ("--format", "safetensors")),
                           (bench.load, ("--format", "dcp", "--target", "dp_shard=2")),
                           (bench.load, ("--format", "dtensor", "--target", "dp_shard=3"))):
        output = source.parent / "out"
        done = bench.attempt([program, source, output, *flags], output, what)
        expect(set(os.listdir(source.parent)) - before <= {"out"}, f"{what}: made more than its output")
        bench.nothing_escaped(source, what)
        if done.code == 0:
            # A newly initialised optimizer has nothing of the source's.
            if "safetensors" not in flags and (program is bench.load or kind.startswith("dtensor")):
                again = run([bench.load, "--check", source, output])
                expect(again.code == 0, f"{what}: accepted, but not the same: {again}")
            shutil.rmtree(output)
        else:
            expect(done.code in (4, 8, 9), f"{what}: {done}")
            expect("\0" not in done.stderr and "\u202e" not in done.stderr and len(done.stderr) < 4000,
                   f"{what}: shown raw: {done}")
        bench.count("other formats: names, " + ("kept" if done.code == 0 else "refused"))
    shutil.rmtree(source.parent)
