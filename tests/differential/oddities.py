# SPDX-License-Identifier: Apache-2.0
"""Zip archives that hold together and are odd: whatever readers may take for one thing or another."""

import dataclasses
import struct
import zlib

ONES16, ONES32 = 0xFFFF, 0xFFFFFFFF
LOCAL, ENTRY, END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
END64, LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
ZIP64, UNICODE_NAME, AES = 1, 0x7075, 0x9901
TAIL = 65535 + END.size + LOCATOR.size  # possible length of an end record with its locator


@dataclasses.dataclass
class Member:
    """An entry of the directory, and the bytes in the file from its local header to the next."""

    name: bytes
    comment: bytes
    local: list  # the numbers of the local header behind its signature
    local_name: bytes
    payload: bytes  # behind the name: extra field, content, descriptor
    made: int
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed: int
    size: int
    disk: int
    attributes: tuple
    fields: list  # of the extra field: (number, bytes)
    wide: tuple = ()  # fields among size, packed and offset that are in the zip64 field
    more: bytes = b""  # behind them
    tail: bytes = b""  # of the extra field
    gap: bytes = b""  # before the local header
    shift: int = 0  # added to the offset in the directory


@dataclasses.dataclass
class Archive:
    members: list  # in file order
    order: list  # in directory order
    comment: bytes
    zip64: bool
    gap: bytes = b""  # before the directory
    between: bytes = b""  # behind the zip64 end record's numbers
    end: dict = dataclasses.field(default_factory=dict)  # numbers of the end records that are not as they should be


def end_record(data):
    """Offset of the last possible end record that the file has space for."""
    return data.rindex(b"PK\5\6", 0, len(data) - END.size + 4)


def several_ends(data):
    """True if there may be another end record."""
    return data.find(b"PK\5\6", max(0, len(data) - TAIL)) != end_record(data)


def entries(data):
    """\\returns whether there is a zip64 end record, where the directory begins, and of each entry its numbers behind the
    signature, name, extra field and comment"""
    at = end_record(data)
    _, _, _, _, count, _, first, _ = END.unpack_from(data, at)
    zip64 = at >= LOCATOR.size and data[at - LOCATOR.size:].startswith(b"PK\6\7")
    if zip64:
        *_, count, _, first = END64.unpack_from(data, LOCATOR.unpack_from(data, at - LOCATOR.size)[2])
    found, place = [], first
    for _ in range(count):
        _, *numbers = ENTRY.unpack_from(data, place)
        texts = []
        place += ENTRY.size
        for length in numbers[9:12]:
            texts.append(data[place:place + length])
            place += length
        found.append((numbers, *texts))
    return zip64, first, found


def fields_of(extra):
    found = []
    while len(extra) >= 4:
        number, count = struct.unpack_from("<HH", extra)
        found.append((number, extra[4:4 + count]))
        extra = extra[4 + count:]
    return found


def parse(data):
    """\\param data  an archive that is sound"""
    zip64, first, found = entries(data)
    members = []
    for numbers, name, extra, comment in found:
        made, needed, flags, method, time, date, crc, packed, size, _, _, _, disk, inside, outside, offset = numbers
        fields = fields_of(extra)
        wide = b"".join(body for number, body in fields if number == ZIP64)
        values = [size, packed, offset]
        for i, number in enumerate(values):
            if number == ONES32:
                values[i], = struct.unpack_from("<Q", wide)
                wide = wide[8:]
        size, packed, offset = values
        members.append((offset, Member(
            name, comment, [], b"", b"", made, needed, flags, method, time, date, crc, packed, size, disk, (inside, outside),
            [field for field in fields if field[0] != ZIP64])))
    places = sorted(offset for offset, _ in members) + [first]
    for offset, one in members:
        chunk = data[offset:places[places.index(offset) + 1]]
        _, *one.local = LOCAL.unpack_from(chunk)
        behind = LOCAL.size + one.local[8]
        one.local_name, one.payload = chunk[LOCAL.size:behind], chunk[behind:]
    in_file = [one for _, one in sorted(members, key=lambda pair: pair[0])]
    return Archive(in_file, [one for _, one in members], data[end_record(data) + END.size:], zip64)


def build(archive):
    out, offsets = b"", {}
    for one in archive.members:
        out += one.gap
        offsets[id(one)] = len(out)
        one.local[8] = len(one.local_name)
        out += LOCAL.pack(b"PK\3\4", *one.local) + one.local_name + one.payload
    out += archive.gap
    first = len(out)
    out += directory(archive.order, offsets)
    return out + ending(archive, len(archive.order), first, len(out) - first, archive.comment)


def directory(order, offsets):
    out = b""
    for one in order:
        values = {"size": one.size, "packed": one.packed, "offset": offsets[id(one)] + one.shift}
        wide = b"".join(struct.pack("<Q", values[key] % (1 << 64)) for key in values if key in one.wide) + one.more
        extra = struct.pack("<HH", ZIP64, len(wide)) + wide if wide or one.wide else b""
        extra += b"".join(struct.pack("<HH", number, len(body)) + body for number, body in one.fields) + one.tail
        size, packed, offset = (ONES32 if key in one.wide else value & ONES32 for key, value in values.items())
        out += ENTRY.pack(b"PK\1\2", one.made, one.needed, one.flags, one.method, one.time, one.date, one.crc, packed, size,
                          len(one.name), len(extra), len(one.comment), one.disk, *one.attributes, offset)
        out += one.name + extra + one.comment
    return out


def ending(archive, count, first, size, comment):
    out, said = b"", archive.end.get
    if archive.zip64:
        more = archive.between
        out += END64.pack(b"PK\6\6", 44 + len(more), 45, 45, said("disk64", 0), said("start64", 0), count, count, size, first) + more
        out += LOCATOR.pack(b"PK\6\7", said("locator", 0), first + size, said("disks", 1))
    narrow = archive.zip64 and said("narrow", False)
    out += END.pack(b"PK\5\6", said("disk", 0), said("start", 0), *([ONES16 if narrow else count & ONES16] * 2),
                    *([ONES32] * 2 if narrow else (size, first)), said("comment", len(comment)))
    return out + comment


def odd(choose, data):
    """The same archive with one or two oddities."""
    archive = parse(data)
    for _ in range(choose.choice((1, 1, 2))):
        oddity = choose.choice(ODDITIES)
        oddity(choose, archive, choose.choice(archive.members))
    if several_ends(build(archive)):
        # Two inputs that zipfile, the reference in such cases, cannot read: it looks for the zip64 end record right
        # before its locator, and for an end record at the last signature, even without space for one.
        archive.between = b""
        if 0 <= archive.comment.rfind(b"PK\5\6") > len(archive.comment) - END.size:
            archive.comment += bytes(END.size)
    return build(archive)


def unicode_name(choose, _, one):
    """A field that repeats the name in UTF-8, or gives another."""
    name = choose.choice((one.name, b"other", one.name + b"x", b"", "\u00fc".encode(), b"../up", b"\xff"))
    crc = choose.choice((zlib.crc32(one.name),) * 3 + (zlib.crc32(name), 0))
    body = struct.pack("<BI", choose.choice((1, 1, 1, 0, 2)), crc) + name
    one.fields.insert(choose.randrange(len(one.fields) + 1), (UNICODE_NAME, body[:choose.choice((99, 99, 99, 3))]))


def zip64_field(choose, _, one):
    one.wide = choose.choice((("size",), ("packed",), ("offset",), ("size", "packed"), ("size", "packed", "offset"), ()))
    one.more = choose.choice((b"", b"", bytes(4), bytes(8), b"\1" * 8, bytes(12), struct.pack("<Q", one.packed)))
    if choose.randrange(4) == 0:
        one.disk = choose.choice((ONES16, 1))
    if choose.randrange(6) == 0:
        one.fields.append((ZIP64, choose.choice((b"", bytes(8), bytes(24)))))


def encrypted(choose, _, one):
    one.method = one.local[2] = 99
    if choose.randrange(4) != 0:
        body = struct.pack("<H2sBH", choose.choice((1, 2, 3)), choose.choice((b"AE", b"XX")), choose.choice((1, 3, 9)), 0)
        one.fields.append((AES, body + choose.choice((b"", b"", b"x"))))


def other_end(choose, archive, _):
    """An end record within the comment, which reaches to the end of the file or not, with a directory or without."""
    way = choose.randrange(4)
    if way == 0:
        archive.comment = archive.comment[:99] + b"PK\5\6" + choose.randbytes(choose.choice((0, 17, 18, 19, 40)))
        return
    after = choose.randbytes(choose.choice((0, 0, 1, 30))).replace(b"P", b"")
    said = choose.choice((0, len(after), len(after) + 1, max(0, len(after) - 1)))
    archive.comment = b""
    plain = build(archive)
    offsets, place = {}, 0
    for one in archive.members:
        place += len(one.gap)
        offsets[id(one)] = place
        place += LOCAL.size + len(one.local_name) + len(one.payload)
    order = archive.order if way == 1 else archive.order[:choose.randrange(len(archive.order) + 1)]
    listed = directory(order, offsets)
    if len(listed) < 65000:
        archive.comment = listed + END.pack(b"PK\5\6", 0, 0, len(order), len(order), len(listed), len(plain), said) + after


def shuffled(choose, archive, _):
    choose.shuffle(archive.order)


def hidden(_, archive, one):
    archive.order = [other for other in archive.order if other is not one]


def twice(choose, archive, one):
    copy = dataclasses.replace(one, fields=list(one.fields), local=list(one.local))
    if choose.randrange(2):
        copy.name = copy.local_name = one.name.swapcase()
    archive.order.append(copy)
    if choose.randrange(2):
        archive.members.append(copy)
    else:
        archive.members.insert(0, copy)


def gap(choose, archive, one):
    bytes_ = choose.choice((b"x", bytes(20), b"PK\7\x08" + bytes(12), b"PK\3\4" + bytes(26), b"PK\5\6" + bytes(18)))
    if choose.randrange(3) == 0:
        archive.gap = bytes_
    else:
        one.gap = bytes_


def value(choose, _, one):
    """Another number, in the directory, the local header or both."""
    key, place = choose.choice((("needed", 0), ("flags", 1), ("method", 2), ("time", 3), ("date", 4), ("crc", 5), ("packed", 6),
                                ("size", 7), ("disk", None), ("made", None)))
    old = getattr(one, key)
    width = 32 if key in ("crc", "packed", "size") else 16
    new = choose.choice((0, 1, old + 1, old - 1, old ^ 1 << choose.randrange(width), (1 << width) - 1)) & (1 << width) - 1
    if key == "packed" and choose.randrange(2):
        one.size = one.local[7] = new
    where = choose.randrange(3) if place is not None else 0
    if where != 1:
        setattr(one, key, new)
    if where != 0:
        one.local[place] = new


def local_value(choose, _, one):
    one.local[9] = choose.choice((0, 1, one.local[9] + 1, one.local[9] - 1, ONES16)) & ONES16


def descriptor(choose, _, one):
    """Flag 8 declares that checksums and sizes follow the content."""
    one.flags ^= 8
    one.local[1] ^= 8
    if choose.randrange(2):
        one.local[5:8] = [0, 0, 0]


def no_sum(choose, _, one):
    one.crc = 0
    if choose.randrange(2):
        one.local[5] = 0


def other_name(choose, _, one):
    name = choose.choice((one.name + b"/", b"A" + one.name, one.name * 9, "\u0301".encode() + one.name, b"\xc3\xa9\xff",
                          "\udc80".encode("utf-8", "surrogatepass"), b"\xc0\xaf", b"a\0b", b"x" * 60000, b" ", b"caf\x82"))
    name = name[:60000]
    where = choose.randrange(3)
    if where != 1:
        one.name = name
    if where != 0:
        one.local_name = name
    if choose.randrange(2):
        one.flags ^= 0x800
        one.local[1] ^= 0x800


def other_comment(choose, _, one):
    one.comment = choose.choice((b"\xff", "\u00fc".encode(), b"PK\1\2" + bytes(42), b"PK\5\6" + bytes(18), b"x" * 60000))
    if choose.randrange(2):
        one.flags ^= 0x800
        one.local[1] ^= 0x800


def broken_field(choose, _, one):
    one.tail = choose.choice((b"\0", b"\0\0\0", b"x", b"ab\xff\0x", b"PK\0\0", b"\1\0\0\0"))


def ends(choose, archive, _):
    archive.zip64 = choose.randrange(4) != 0
    archive.between = choose.choice((b"", b"", bytes(4), bytes(56), b"PK\6\6" + bytes(52)))
    key = choose.choice(("disk64", "start64", "locator", "disks", "narrow", "disk", "start", "comment"))
    archive.end[key] = choose.choice((0, 1, 2, ONES16))


def inner(choose, archive, one):
    """An archive as the content of a member, or an end record alone."""
    if one.method != 0 or one.flags & 8 or one.size != one.local[7]:
        return
    content = choose.choice((build(dataclasses.replace(archive, comment=b"")), END.pack(b"PK\5\6", *[0] * 7)))
    extra = one.local[9]
    one.payload = one.payload[:extra] + content
    one.size = one.packed = one.local[6] = one.local[7] = len(content)
    one.crc = one.local[5] = zlib.crc32(content)


def shifted(choose, _, one):
    one.shift = choose.choice((-1, 1, 4, -30, 1 << 63))


ODDITIES = (unicode_name, unicode_name, zip64_field, zip64_field, encrypted, other_end, other_end, shuffled, hidden, twice, gap,
            value, value, value, local_value, descriptor, no_sum, other_name, other_comment, broken_field, ends, inner, shifted)
