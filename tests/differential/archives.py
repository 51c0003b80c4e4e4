# SPDX-License-Identifier: Apache-2.0
"""Zip archives as Python's zipfile writes them, and the members that it reads in them."""

import io
import struct
import zipfile
import zlib


class Unseekable(io.RawIOBase):
    """A stream: zipfile writes data descriptors into it."""

    def __init__(self):
        super().__init__()
        self.data = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        return len(data)


class small_limits:
    """As if 4 GiB and 65,536 members were little: zip64 in small archives."""

    def __init__(self, on, choose):
        self.on, self.kept = on, (zipfile.ZIP64_LIMIT, zipfile.ZIP_FILECOUNT_LIMIT)
        self.limits = (choose.choice((10, 100, 1000)), choose.choice((0, 2, 1 << 16)))

    def __enter__(self):
        if self.on:
            zipfile.ZIP64_LIMIT, zipfile.ZIP_FILECOUNT_LIMIT = self.limits

    def __exit__(self, *_):
        zipfile.ZIP64_LIMIT, zipfile.ZIP_FILECOUNT_LIMIT = self.kept


NAMES = ("a", "data.pkl", "data/0", "data/1", "version", "grüße", "日本", "a b", "x" * 300, "deep/er/still", "D", "d.e")
UNSAFE = ("../up", "/root", "a/../b", "a\\b", "c:d", "a//b", "./a", "tab\t", "")


def any_name(choose):
    return choose.choice(NAMES) + choose.choice(("", ".x", f"{choose.randrange(99)}"))


def make(choose, text=False):
    """\\param text  comments of members are text, as flags may declare
    \\returns the archive, and True if docs/formats/pt.md requires readers to accept it"""
    stream = choose.randrange(3) == 0
    out = Unseekable() if stream else io.BytesIO()
    sound, names = True, set()
    little = choose.randrange(3) == 0
    with small_limits(little, choose), zipfile.ZipFile(out, "w") as archive:
        for _ in range(choose.choice((0, 1, 1, 2, 3, 5, 20))):
            name = any_name(choose)
            if choose.randrange(60) == 0:
                name = choose.choice(UNSAFE)
                sound = False
            if name.lower() in names:
                continue
            names.add(name.lower())
            info = zipfile.ZipInfo(name, (1980 + choose.randrange(99), 1, 1, 0, 0, 0))
            info.compress_type = choose.choice((zipfile.ZIP_STORED,) * 3 + (zipfile.ZIP_DEFLATED,))
            info.extra = padding(choose)
            info.comment = choose.randbytes(choose.choice((0, 0, 9)))
            if text:
                info.comment = info.comment.hex().encode()
            content = choose.randbytes(choose.choice((0, 1, 11, 99, 101, 5000)))
            with archive.open(info, "w", force_zip64=little or choose.randrange(3) == 0) as member:
                for at in range(0, len(content), 700):
                    member.write(content[at:at + 700])
        if choose.randrange(4) == 0:
            archive.comment = choose.randbytes(choose.choice((1, 30, 3000, 65535))).replace(b"PK", b"KP")
        sound = sound and bool(names)
    data = bytes(out.data) if stream else out.getvalue()
    if choose.randrange(30) == 0:
        return b"#!/bin/sh\n" + data, False  # zipfile allows for bytes before an archive
    return data, sound


def padding(choose):
    """An extra field as torch aligns with."""
    count = choose.choice((0, 0, 1, 40))
    return b"FB" + struct.pack("<H", count) + b"Z" * count if count else b""


def read(data):
    """\\returns members as differential_probe lists them"""
    members = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in sorted(archive.infolist(), key=lambda one: one.header_offset):
            name, extra = struct.unpack("<HH", data[info.header_offset + 26:info.header_offset + 30])
            encoding = "utf-8" if info.flag_bits & 0x800 else "cp437"
            member = {"name": info.orig_filename.encode(encoding).hex(), "header": info.header_offset,
                      "payload": info.header_offset + 30 + name + extra, "bytes": info.file_size,
                      "method": info.compress_type, "crc": info.CRC}
            if info.compress_type == zipfile.ZIP_STORED:
                try:
                    member["sum"] = zlib.crc32(archive.read(info))
                except zipfile.BadZipFile as bad:
                    if "CRC" not in str(bad):
                        raise
                    member["sum"] = None
                if info.CRC == 0:  # read as "not computed"
                    member["sum"] = zlib.crc32(data[member["payload"]:member["payload"] + info.file_size])
            members.append(member)
    return members


def torch_file(choose, pickled, storages, protocol_folder="archive"):
    """A file of torch.save around a pickle. \\returns its bytes, {key: content}"""
    contents = {}
    out = Unseekable() if choose.randrange(3) == 0 else io.BytesIO()
    little = choose.randrange(4) == 0
    with small_limits(little, choose), zipfile.ZipFile(out, "w") as archive:
        members = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
        for key, size in storages.items():
            contents[key] = choose.randbytes(size)
            members.append((f"data/{key}", contents[key]))
        if choose.randrange(2):
            choose.shuffle(members)
        for name, content in members:
            info = zipfile.ZipInfo(f"{protocol_folder}/{name}")
            info.extra = padding(choose)
            with archive.open(info, "w", force_zip64=little or choose.randrange(4) == 0) as member:
                member.write(content)
    return bytes(out.data) if isinstance(out, Unseekable) else out.getvalue(), contents
