# SPDX-License-Identifier: Apache-2.0
"""The other formats' files with damaged bytes, in each other's place, or no files at all."""

import json
import os
import random
import shutil

import broken_files
import ptfile
import rows as of
from harness import expect

# No checksum covers them: a changed name is a name.
WITHOUT_SUMS = (of.INDEX, "metadata.pkl", "fsdp_config.json", "metadata.json", "latest_checkpointed_iteration.txt")
# State of one rank that is carried as it is.
OF_A_RANK = "extra_state"


def chosen(cases, thorough, count, seed):
    """A few cases; where it is thorough all, or 100 of a row."""
    cases, count = list(cases), 100 if thorough else count
    return cases if len(cases) <= count else random.Random(seed).sample(cases, count)


def shown(name):
    """The name of a file in messages: without the folder."""
    return name.name


def truncations(bench, thorough):
    """\\returns jobs"""
    jobs = []
    for row in of.rows(bench):
        cuts = []
        for name in row.files:
            size = (row.origin / name).stat().st_size
            lengths = {0, 1, 2, 22, 64, size // 3, size // 2, size - 64, size - 22, size - 2, size - 1}
            cuts += [(name, length) for length in sorted(lengths) if 0 <= length < size]

        def harm(name, length):
            def cut(source):
                path = source / name
                path.write_bytes(path.read_bytes()[:length])
            return cut

        for name, length in chosen(cuts, thorough, 3, row.name):
            loose = name.name in WITHOUT_SUMS and name.name != of.INDEX
            jobs.append(lambda r=row, n=name, c=length, e=loose: r.judge(
                "other formats: truncated", f"{n} cut to {c} bytes", harm(n, c), () if e else (shown(n),),
                may_pass=e))
    return jobs


def flips(bench, thorough):
    jobs = []
    for row in of.rows(bench):
        cases = []
        for index, name in enumerate(row.files):
            size = (row.origin / name).stat().st_size
            choose = random.Random(f"{row.name} {index}")
            count = 300 if name.name == of.INDEX else 25
            cases += [(name, choose.randrange(size), choose.randrange(8)) for _ in range(count)]

        def harm(name, position, bit):
            def flip(source):
                path = source / name
                data = bytearray(path.read_bytes())
                data[position] ^= 1 << bit
                path.write_bytes(data)
            return flip

        for name, position, bit in chosen(cases, thorough, 4, row.name):
            loose = name.name in WITHOUT_SUMS
            group = "other formats: bit flips in " + ("indexes" if loose else "files with checksums")
            jobs.append(lambda r=row, n=name, p=position, b=bit, e=loose, g=group: r.judge(
                g, f"bit {b} of byte {p} of {n} flipped", harm(n, p, b), () if e else (shown(n),),
                may_pass=True, may_differ=e))
    return jobs


# --- files in the wrong place ----------------------------------------------------------------------


def swaps(bench, thorough):
    jobs = []
    for row in of.rows(bench):
        cases = [("copied over", a, b) for a in row.files for b in row.files if a != b]
        cases += [("exchanged with", a, b) for _, a, b in cases if a < b]
        for how, a, b in chosen(cases, thorough, 2, row.name):
            jobs.append(lambda r=row, h=how, x=a, y=b: r.judge(
                "other formats: exchanged files", f"{x} {h} {y}", swapped(h, x, y),
                may_pass=True, may_differ=OF_A_RANK in y.name))
    return jobs


def swapped(how, a, b):
    def harm(source):
        first, second = (source / a).read_bytes(), (source / b).read_bytes()
        (source / b).write_bytes(first)
        if how == "exchanged with":
            (source / a).write_bytes(second)
    return harm


def in_place_of(name, make):
    def harm(source):
        path = source / name
        shutil.move(path, source.parent / "elsewhere")
        make(path)
    return harm


def folders(bench, thorough):
    """Something else than a file under its name, in each kind of place."""
    kinds = (("nothing", lambda path: None),
             ("a folder", lambda path: path.mkdir()),
             ("a pipe", os.mkfifo),
             ("a link that leads nowhere", lambda path: path.symlink_to("nowhere")),
             ("a link to itself", lambda path: path.symlink_to(path.name)),
             ("a link to a device", lambda path: path.symlink_to("/dev/zero")),
             ("a link to a secret", lambda path: path.symlink_to("/etc/passwd")))
    jobs = []
    for row in of.rows(bench):
        cases = [(name, kind, make) for name in row.files for kind, make in kinds]
        for name, kind, make in chosen(cases, thorough, 2, row.name):
            # A file with repeated content may be missing.
            loose = name.name in ("fsdp_config.json", "latest_checkpointed_iteration.txt")
            jobs.append(lambda r=row, n=name, k=kind, m=make, e=loose: r.judge(
                "other formats: no files", f"{k} for {n}", in_place_of(n, m), codes=(3, 4, 9), may_pass=e,
                may_differ=e))
        for name in chosen(row.files, thorough, 1, row.name):
            jobs.append(lambda r=row, n=name: link_out(r, n))
    return jobs


def link_out(row, name):
    """Per-rank files may be links, as people keep them; items of a DCP folder are inside it."""
    in_dcp = name.suffix == ".distcp" or name.name == of.INDEX
    row.judge("other formats: links out of the folder", f"{name} is a link", in_place_of(
        name, lambda path: path.symlink_to(os.path.relpath(row.origin / name, path.parent))),
              (shown(name), "link") if in_dcp else (), (4,), may_pass=not in_dcp)


# --- archives and pickles --------------------------------------------------------------------------


def victims(row, with_storages=False):
    """Things with archives: (name, function that calls `make` with a path to one and takes the result).
    One of a kind: the last file of each item, the item of the largest tensor and of an object."""
    found = {}
    for name in row.files:
        path = row.origin / name
        if of.is_archive(path) and (not with_storages or of.payload_of(path)[1]):
            found[name.name.split("_")[0], name.parent] = name
    for name in found.values():
        yield shown(name), lambda source, make, n=name: make(source / n)
    for folder in of.indexes(row.origin):
        index = of.Index(folder)
        tensors = {name for name, one in index.tensors.items() if "size" in (one.state or {})}
        held = sorted(index.places.items(), key=lambda item: item[1].state["length"])
        for kind, wanted in (("tensor", True), ("object", False)):
            keys = [key for key, _ in held if (key.state["fqn"] in tensors) == wanted]
            if keys:
                fqn = keys[-1].state["fqn"]
                yield (f"{kind} {fqn}", lambda source, make, f=folder.relative_to(row.origin), n=fqn:
                       in_item(source / f, n, make))


def in_item(folder, fqn, make):
    index = of.Index(folder)
    place = index.places_of(fqn)[-1][1]
    path = folder / "an item"
    path.write_bytes(index.item(place))
    make(path)
    index.replace_item(place, path.read_bytes())
    path.unlink()


def archives(bench, thorough):
    jobs = []
    for row in of.rows(bench):
        cases = [(what, make, victim, change) for what, make in broken_files.archives()
                 for victim, change in victims(row, with_storages=True) if not victim.startswith("object ")]
        for what, make, victim, change in chosen(cases, thorough, 2, row.name):
            jobs.append(lambda r=row, w=what, m=make, v=victim, c=change: r.judge(
                "other formats: archives with false fields", f"{v}: {w}", lambda source: c(source, m), codes=(4, 8, 9),
                may_pass=w in broken_files.HARMLESS_ARCHIVES))
    return jobs


def pickles(bench, thorough):
    calls, bombs = broken_files.calls(bench.canary), broken_files.bombs()
    jobs = []
    for row in of.rows(bench):
        cases = []
        for victim, change in victims(row):
            for what, value in calls:
                cases.append(("pickles that call", f"{victim}: {what}", rewrite(change, b"\x80\x04" + value + b"."),
                              victim))
            for what, data in bombs:
                cases.append(("pickle bombs", f"{victim}: {what}", rewrite(change, data), victim))
        for name in row.files:
            if name.name not in (of.INDEX, "metadata.pkl"):
                continue
            for what, value in calls:
                cases.append(("pickles that call", f"{name}: {what}", bare(name, b"\x80\x04" + value + b"."), ""))
                cases.append(("pickles that call", f"{name}: {what} inside", inside(name, value), "inside"))
            for what, data in bombs:
                cases.append(("pickle bombs", f"{name}: {what}", bare(name, data), ""))
        for group, what, harm, victim in chosen(cases, thorough, 4, row.name):
            # Objects of other programs, and files that no reader looks at, are copied or ignored.
            loose = victim == "inside" or victim.startswith("object ") or OF_A_RANK.startswith(victim[:5] or "-")
            jobs.append(lambda r=row, g=group, w=what, h=harm, e=loose: r.judge(
                f"other formats: {g}", w, h, codes=(4, 8, 9), may_pass=e, may_differ=e))
    return jobs


def rewrite(change, data):
    def make(path):
        ptfile.write(path, data, of.payload_of(path)[1])
    return lambda source: change(source, make)


def bare(name, data):
    return lambda source: (source / name).write_bytes(data)


def inside(name, value):
    """The call is the value of one more attribute, or key, of the root."""
    def harm(source):
        path = source / name
        if name.name == of.INDEX:
            of.Index(path.parent).save()
            end = b"ub."
        else:
            path.write_bytes(of.pickled(ptfile.Reader(open(path, "rb"), {}).load()))
            end = b"u."
        sound = path.read_bytes()
        expect(sound.endswith(end), f"{name} ends as expected")
        path.write_bytes(sound[:-len(end)] + broken_files.text("mcore_data") + value + end)
    return harm


# --- JSON ------------------------------------------------------------------------------------------


def documents(bench, thorough):
    values = (None, -1, 1 << 62, 1.5, "../x", [], {}, True, [[]])
    jobs = []
    for row in of.rows(bench):
        cases = []
        for name in row.files:
            if name.suffix != ".json":
                continue
            sound = json.loads((row.origin / name).read_text())
            changed = [{**sound, key: value} for key in sound for value in values]
            changed += [{other: value for other, value in sound.items() if other != key} for key in sound]
            texts = [json.dumps(value) for value in (*changed, *values)]
            cases += [(name, text) for text in (*texts, "[" * 500000, "{", "\0", "\xff", '{"a":1,"a":2}', "9" * 100000)]
        for name, text in chosen(cases, thorough, 1, row.name):
            jobs.append(lambda r=row, n=name, t=text: r.judge(
                "other formats: documents", f"{n} is {t[:60]}",
                lambda source: (source / n).write_text(t, encoding="latin-1"), may_pass=True, may_differ=True))
        for name in row.files:
            if name.name != "latest_checkpointed_iteration.txt":
                continue
            for text in chosen(("", " ", "..", "../elsewhere", "/etc", "iter_0000007/..", "-7", "7x", "7\0", "9" * 40,
                                "release", "8", "x" * (9 << 20)), thorough, 2, row.name):
                jobs.append(lambda r=row, n=name, t=text: r.judge(
                    "other formats: trackers", f"tracker is {t[:30]!r}", lambda source: (source / n).write_text(t),
                    (n.name,)))
    return jobs
