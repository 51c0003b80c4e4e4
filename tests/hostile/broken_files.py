# SPDX-License-Identifier: Apache-2.0
"""Files with damaged bytes, archives with false headers, pickles that run code."""

import pickle
import random
import shutil
import struct
import warnings
import zipfile

import bench as at
import ptfile
from harness import expect, run, real_checkpoints, tree


def members(path):
    """\\returns (name, offset of the bytes, size) of every member"""
    found = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            first = info.header_offset + 30 + name_bytes + extra_bytes
            found.append((info.filename, first, info.file_size))
    return found


def files(source):
    return sorted(at.tag_folder(source).iterdir())


def truncations(bench, thorough):
    """\\returns jobs"""
    jobs = []
    for index, path in enumerate(files(at.DEMO)):
        size = path.stat().st_size
        lengths = {0, 1, 3, 4, 21, 22, 63, 64, 65, size - 1, size - 21, size - 22, size - 23,
                   size - 42, size // 2}
        for _, first, count in members(path):
            lengths |= {first, first + count, first + count // 2}
        choose = random.Random(index)
        lengths = sorted(length for length in lengths if 0 <= length < size)
        lengths = lengths if thorough else choose.sample(lengths, min(len(lengths), 16))

        def job(index=index, length=0, name=path.name):
            source = bench.demo()
            victim = files(source)[index]
            victim.write_bytes(victim.read_bytes()[:length])
            bench.refused(source, f"{name} cut to {length} bytes", [name], group="truncated, refused")

        jobs += [lambda job=job, length=length: job(length=length) for length in lengths]
    return jobs


def flip(bench, index, position, bit, member, group):
    source = bench.demo()
    victim = files(source)[index]
    data = bytearray(victim.read_bytes())
    data[position] ^= 1 << bit
    victim.write_bytes(data)
    what = f"{victim.name}: bit {bit} of byte {position} flipped ({member or 'anywhere'})"
    words = [victim.name] + ([member] if member else [])
    # A flipped bit of the archive's own records may also make it another kind of archive.
    codes = (4,) if member else (4, 8, 9)
    bench.refused_or_harmless(source, what, words, group, codes)


def flips(bench, thorough):
    jobs = []
    choose = random.Random(7)
    for index, path in enumerate(files(at.DEMO)):
        for name, first, count in members(path):
            inner = name.split("/", 1)[1]
            for _ in range(8 if thorough else 1):
                if count == 0:
                    continue
                position, bit = first + choose.randrange(count), choose.randrange(8)
                jobs.append(lambda i=index, p=position, b=bit, m=inner:
                            flip(bench, i, p, b, m, "bit flips in members"))
        size = path.stat().st_size
        for _ in range(1500 if thorough else 40):
            position, bit = choose.randrange(size), choose.randrange(8)
            jobs.append(lambda i=index, p=position, b=bit:
                        flip(bench, i, p, b, None, "bit flips anywhere"))
        # A wrong directory at the end does the most harm.
        for _ in range(400 if thorough else 20):
            position, bit = size - 1 - choose.randrange(2500), choose.randrange(8)
            jobs.append(lambda i=index, p=position, b=bit:
                        flip(bench, i, p, b, None, "bit flips in directories"))
    return jobs


def real_flips(bench, thorough):
    """The same for real checkpoints of all layouts: every payload of every file, or a few of each
    checkpoint."""
    jobs = []
    for source in real_checkpoints():
        choose = random.Random(source.parent.name)
        sound = bench.place() / "out"
        expect(run([bench.union, source, sound]).code == 0, f"{source}: the sound checkpoint")
        wanted = tree(sound)
        shutil.rmtree(sound.parent)
        places = [(path, name.split("/", 1)[1], first + choose.randrange(count))
                  for path in sorted(source.rglob("*.pt")) for name, first, count in members(path)
                  if "/data/" in name and count]
        places = places if thorough else choose.sample(places, min(3, len(places)))
        jobs += [lambda s=source, w=wanted, p=place: real_flip(bench, s, w, *p)
                 for place in places]
    return jobs


def real_flip(bench, origin, wanted, path, member, position):
    source = shutil.copytree(origin, bench.place() / "ckpt", copy_function=shutil.copyfile)
    victim = source / path.relative_to(origin)
    with open(victim, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 16]))
    output = source.parent / "out"
    what = f"{origin.parent.name}: {victim.name}: byte {position} flipped ({member})"
    done = bench.attempt([bench.union, source, output], output, what)
    if done.code == 0:
        same = {**wanted, "shardwright.json": tree(output)["shardwright.json"]}
        expect(tree(output) == same, f"{what}: accepted, but the output differs")
        bench.count("bit flips in more checkpoints, harmless")
    else:
        damaged = done.code == 4 and member in done.stderr
        expect(damaged and victim.name in done.stderr, f"{what}: {done}")
        bench.count("bit flips in more checkpoints, refused")
    shutil.rmtree(source.parent)


# --- archives ------------------------------------------------------------------------------------


def parts(path):
    """\\returns the pickle and the storages of a .pt file"""
    with zipfile.ZipFile(path) as archive:
        names = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    storages = {name[5:]: data for name, data in names.items() if name.startswith("data/")}
    return names["data.pkl"], storages


def directory(data):
    """\\returns (position of each central record, position of the end record)"""
    end = data.rindex(b"PK\x05\x06")
    count, _, first = struct.unpack("<HII", data[end + 10:end + 20])
    records = []
    for _ in range(count):
        records.append(first)
        name, extra, comment = struct.unpack("<HHH", data[first + 28:first + 34])
        first += 46 + name + extra + comment
    return records, end


def archives():
    """\\returns (what, function that writes the broken file)"""
    def rewrite(edit):
        def make(path):
            ptfile.write(path, *parts(path))
            data = bytearray(path.read_bytes())
            path.write_bytes(edit(data, *directory(data)) or data)
        return make

    def crc(data, records, _):
        data[records[1] + 16] ^= 255

    def size(value):
        def edit(data, records, _):
            struct.pack_into("<II", data, records[1] + 20, value, value)
        return edit

    def offset(value):
        def edit(data, records, _):
            struct.pack_into("<I", data, records[1] + 42, value)
        return edit

    def overlap(data, records, _):
        data[records[2] + 42:records[2] + 46] = data[records[1] + 42:records[1] + 46]

    def method(data, records, _):
        struct.pack_into("<H", data, records[1] + 10, 12)

    def encrypted(data, records, _):
        struct.pack_into("<H", data, records[1] + 8, 1)

    def more_records(data, _, end):
        struct.pack_into("<HH", data, end + 8, 65534, 65534)

    def no_records(data, _, end):
        struct.pack_into("<HHII", data, end + 8, 0, 0, 0, 0)

    def directory_elsewhere(data, _, end):
        struct.pack_into("<I", data, end + 16, 0xfffffff0)

    def directory_huge(data, _, end):
        struct.pack_into("<I", data, end + 12, 0xfffffff0)

    def zip64_lies(data, _, end):
        record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 60, 1 << 60,
                             1 << 62, 1 << 61)
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
        tail = bytearray(data[end:])
        struct.pack_into("<HHII", tail, 8, 0xffff, 0xffff, 0xffffffff, 0xffffffff)
        return bytes(data[:end]) + record + locator + bytes(tail)

    def with_extra(*extra):
        def make(path):
            text, storages = parts(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of duplicate names
                ptfile.write(path, text, storages, extra=extra)
        return make

    def bomb(path):
        text, _ = parts(path)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", text)
            archive.writestr("archive/data/0", bytes(64 << 20))
            archive.writestr("archive/version", "3\n")

    def without(name):
        def make(path):
            text, storages = parts(path)
            storages.pop(name, None)
            ptfile.write(path, text if name != "data.pkl" else b"", storages)
        return make

    def longer(path):
        text, storages = parts(path)
        storages["0"] += bytes(4)
        ptfile.write(path, text, storages)

    def shorter(path):
        text, storages = parts(path)
        storages["0"] = storages["0"][:-4]
        ptfile.write(path, text, storages)

    def big_endian(path):
        text, storages = parts(path)
        ptfile.write(path, text, storages, extra=[("archive/byteorder", b"big")])

    return [
        ("wrong CRC", rewrite(crc)),
        ("member of 4 GiB", rewrite(size(0xfffffffe))),
        ("member past the end", rewrite(size(1 << 24))),
        ("member cut", rewrite(size(3))),
        ("local header past the end", rewrite(offset(0x7fffffff))),
        ("local header elsewhere", rewrite(offset(5))),
        ("overlapping members", rewrite(overlap)),
        ("unknown compression", rewrite(method)),
        ("encrypted member", rewrite(encrypted)),
        ("more records than there are", rewrite(more_records)),
        ("no records", rewrite(no_records)),
        ("directory past the end", rewrite(directory_elsewhere)),
        ("directory of 4 GiB", rewrite(directory_huge)),
        ("a 64-bit directory of 2^60 records", rewrite(zip64_lies)),
        ("deflate bomb", bomb),
        ("duplicate data.pkl", with_extra(("archive/data.pkl", b"\x80\x02N."))),
        ("duplicate storage", with_extra(("archive/data/0", bytes(16)))),
        ("second folder", with_extra(("other/data.pkl", b"\x80\x02N."))),
        ("name with ..", with_extra(("archive/../../../escaped", b"x"))),
        ("absolute name", with_extra(("/tmp/escaped", b"x"))),
        ("name with a backslash", with_extra(("..\\escaped", b"x"))),
        ("storage missing", without("0")),
        ("pickle empty", without("data.pkl")),
        ("storage longer than the pickle says", longer),
        ("storage shorter than the pickle says", shorter),
        ("big-endian", big_endian),
        ("not an archive", lambda path: path.write_bytes(b"hello" * 100)),
        ("only an end record", lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18))),
        ("zeros", lambda path: path.write_bytes(bytes(4096))),
    ]


# Faults without effect: names that are never used as paths, members that nothing refers to.
HARMLESS_ARCHIVES = {"name with ..", "absolute name", "name with a backslash", "second folder",
                     "storage longer than the pickle says"}


def archive_jobs(bench):
    def job(what, make, victim):
        source = bench.demo()
        path = victim(source)
        make(path)
        if what in HARMLESS_ARCHIVES:
            bench.refused_or_harmless(source, what, [path.name], "archives with false fields", (4, 9))
        else:
            bench.refused(source, what, [path.name], (4, 8, 9), group="archives with false fields, refused")
        for escaped in ("escaped", "../escaped"):
            expect(not (bench.folder / escaped).exists(), f"{what}: a name became a path")

    return [lambda w=what, m=make, v=victim: job(w, m, v)
            for what, make in archives() for victim in (at.optim, at.model)]


# --- pickles -------------------------------------------------------------------------------------


def text(word):
    """BINUNICODE"""
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def calls(canary):
    """Every way in which a pickle can have something called. \\returns (what, pickle of a value)"""
    shell = f"touch {canary}"
    python = f"open({str(canary)!r}, 'w')"
    system = [("os", "system"), ("torch", "os.system"), ("posix", "system"), ("subprocess", "getoutput"),
              ("torch.os", "system"), ("nt", "system")]
    found = []
    for module, name in system:
        plain = f"c{module}\n{name}\n".encode()
        stacked = text(module) + text(name) + b"\x93"
        argument = text(shell)
        found += [
            (f"GLOBAL {module}.{name}, REDUCE", plain + argument + b"\x85R"),
            (f"STACK_GLOBAL {module}.{name}, REDUCE", stacked + argument + b"\x85R"),
            (f"NEWOBJ {module}.{name}", plain + argument + b"\x85\x81"),
            (f"NEWOBJ_EX {module}.{name}", plain + argument + b"\x85}\x92"),
            (f"OBJ {module}.{name}", b"(" + plain + argument + b"o"),
            (f"INST {module}.{name}", b"(" + argument + f"i{module}\n{name}\n".encode()),
            (f"BUILD on {module}.{name}", plain + argument + b"b"),
        ]
    for module, name in (("builtins", "eval"), ("builtins", "exec"), ("__builtin__", "eval")):
        found.append((f"{module}.{name}", f"c{module}\n{name}\n".encode() + text(python) + b"\x85R"))
    getattr_chain = (b"cbuiltins\ngetattr\n" + b"cbuiltins\n__import__\n" + text("os") + b"\x85R" +
                     text("system") + b"\x86R" + text(shell) + b"\x85R")
    found.append(("__import__, getattr, call", getattr_chain))
    for code, width in ((b"\x82", "B"), (b"\x83", "<H"), (b"\x84", "<i")):
        found.append((f"EXT{struct.calcsize(width)}",
                      code + struct.pack(width, 1) + text(shell) + b"\x85R"))
    found.append(("PERSID", f"P{shell}\n".encode()))
    found.append(("BINPERSID of a string", text(shell) + b"Q"))
    found.append(("BINPERSID of a class", b"(" + text("storage") + b"cos\nsystem\n" + text("0") +
                  text("cpu") + b"K\x01tQ"))
    found.append(("rebuild with os.system as storage",
                  b"ctorch._utils\n_rebuild_tensor_v2\n(cos\nsystem\n" + text(shell) +
                  b"\x85RK\x00)))\x89NtR"))
    found.append(("_rebuild_from_type_v2",
                  b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\nsystem\n" +
                  text(shell) + b"\x85}tR"))
    return found


def bombs():
    """Pickles that would take forever, or all memory. \\returns (what, whole pickle)"""
    laughs = b"\x80\x02]q\x00"
    for level in range(1, 40):
        laughs += b"](" + (b"h" + bytes([level - 1])) * 10 + b"eq" + bytes([level])
    found = [
        ("nested lists", b"\x80\x02" + b"]" * 200000 + b"a" * 199999 + b"."),
        ("nested tuples", b"\x80\x02N" + b"\x85" * 200000 + b"."),
        ("nested dicts", b"\x80\x02" + b"}K\x00" * 200000 + b"N" + b"s" * 200000 + b"."),
        ("nested calls", b"\x80\x02" + b"ccollections\nOrderedDict\n" * 50000 + b")" +
         b"R" * 50000 + b"."),
        ("marks without end", b"\x80\x02" + b"(" * 5000000 + b"."),
        ("laughs", laughs + b"."),
        ("a list in itself", b"\x80\x02]q\x00h\x00a."),
        ("a dict in itself", b"\x80\x02}q\x00K\x00h\x00s."),
        ("a text of 2^60 bytes", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x."),
        ("bytes of 2^60 bytes", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x."),
        ("bytearray of 2^63 bytes", b"\x80\x05\x96" + struct.pack("<Q", 1 << 63) + b"x."),
        ("a frame of 2^60 bytes", b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N."),
        ("a text of 4 GiB", b"\x80\x02X\xff\xff\xff\xffx."),
        ("a number of 2 GiB", b"\x80\x02\x8b\xff\xff\xff\x7f."),
        ("a number of negative length", b"\x80\x02\x8b\xff\xff\xff\xff."),
        ("memo entry 2^32 - 1", b"\x80\x02Nr\xff\xff\xff\xff."),
        ("memo entry 10^30", b"\x80\x02Np" + b"9" * 30 + b"\n."),
        ("memo entry that is not there", b"\x80\x02h\x07."),
        ("many memo entries", b"\x80\x04" + b"N\x940" * 3000000 + b"N."),
        ("digits without end", b"\x80\x02I" + b"7" * 1000000 + b"\n."),
        ("no end", b"\x80\x02}"),
        ("nothing", b""),
        ("protocol 77", b"\x80\x4dN."),
        ("unknown opcode", b"\x80\x02\xff."),
        ("empty stack", b"\x80\x02."),
        ("pop from nothing", b"\x80\x02000."),
        ("reduce of nothing", b"\x80\x02R."),
        ("odd items", b"\x80\x02}(K\x01u."),
        ("items of a number", b"\x80\x02K\x01(K\x01K\x02u."),
        ("text that is not UTF-8", b"\x80\x02X\x02\x00\x00\x00\xff\xfe."),
        ("None", b"\x80\x02N."),
        ("an empty dict", b"\x80\x02}."),
        ("a list", pickle.dumps([1, 2, 3], 2)),
        ("bytes after the end", b"\x80\x02}.cos\nsystem\n"),
    ]
    return found


def pickle_jobs(bench):
    jobs = []

    def whole(what, data, victim, group):
        source = bench.demo()
        path = victim(source)
        _, storages = parts(path)
        ptfile.write(path, data, storages)
        bench.refused(source, what, [path.name], (4, 8, 9), group=group)

    def inside(what, value):
        """The call sits in the client state of a sound file: refused, or carried along inert."""
        source = bench.demo()
        path = at.model(source)
        sound, storages = parts(path)
        expect(sound.endswith(b"u."), "the demo's pickle ends as expected")
        ptfile.write(path, sound[:-2] + text("client") + value + b"u.", storages)
        done, _ = bench.convert(source, what)
        bench.count("pickles that call, inert" if done.code == 0 else "pickles that call, refused")

    for what, value in calls(bench.canary):
        jobs.append(lambda w=what, v=value: inside(f"{w} in client state", v))
        for victim in (at.optim, at.model):
            jobs.append(lambda w=what, v=value, p=victim:
                        whole(w, b"\x80\x04" + v + b".", p, "pickles that call, refused"))
            # In addition to the files that a reader looks for first.
            jobs.append(lambda w=what, v=value, p=victim: whole(
                f"{w} as optimizer_state_dict",
                b"\x80\x04}(" + text("optimizer_state_dict") + v + text("module") + v + b"u.", p,
                "pickles that call, refused"))
    for what, data in bombs():
        jobs.append(lambda w=what, d=data: whole(w, d, at.optim, "pickle bombs, refused"))
        jobs.append(lambda w=what, d=data: whole(w, d, at.model, "pickle bombs, refused"))
    return jobs


