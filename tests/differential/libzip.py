# SPDX-License-Identifier: Apache-2.0
"""Zip archives as libzip writes them, and the members that it reads in them. Debian has it in libzip4."""

import contextlib
import ctypes
import ctypes.util
import zlib

import archives
import oddities

# Of zip.h: for opening, for names and extra fields, methods, errors.
CREATE, CHECKCONS, TRUNCATE, RDONLY = 1, 4, 8, 16
ENC_RAW, LOCAL, CENTRAL = 64, 256, 512
NEW_FIELD = 0xFFFF
DEFAULT, STORE, DEFLATE, AES = -1, 0, 8, 99
ER_CRC = 7
INCONSISTENT = "Zip archive inconsistent"
ZIP64_END = b"PK\6\6"
MOST = 1 << 24  # bytes of content that is compressed


class Error(ctypes.Structure):
    _fields_ = [("zip", ctypes.c_int), ("system", ctypes.c_int), ("text", ctypes.c_char_p)]


class Stat(ctypes.Structure):
    _fields_ = [("valid", ctypes.c_uint64), ("name", ctypes.c_char_p), ("index", ctypes.c_uint64), ("size", ctypes.c_uint64),
                ("comp_size", ctypes.c_uint64), ("mtime", ctypes.c_long), ("crc", ctypes.c_uint32),
                ("comp_method", ctypes.c_uint16), ("encryption_method", ctypes.c_uint16), ("flags", ctypes.c_uint32)]


class Refused(Exception):
    """An error with the reason that libzip gives."""


class Archive(ctypes.c_void_p):
    """A zip_t *. Pointers have classes of their own, so that one is not taken for another."""


class Source(ctypes.c_void_p):
    """A zip_source_t *."""


class File(ctypes.c_void_p):
    """A zip_file_t *."""


TEXT, DATA, SIZE, INDEX = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
FLAGS, SHORT, INT, LONG = ctypes.c_uint32, ctypes.c_uint16, ctypes.c_int, ctypes.c_int64
ERROR, STAT = ctypes.POINTER(Error), ctypes.POINTER(Stat)
FUNCTIONS = {
    "zip_error_init": (None, ERROR), "zip_error_fini": (None, ERROR),
    "zip_error_strerror": (TEXT, ERROR), "zip_error_code_zip": (INT, ERROR),
    "zip_source_buffer_create": (Source, DATA, SIZE, INT, ERROR), "zip_source_buffer": (Source, Archive, DATA, SIZE, INT),
    "zip_source_keep": (None, Source), "zip_source_free": (None, Source), "zip_source_error": (ERROR, Source),
    "zip_source_open": (INT, Source), "zip_source_read": (LONG, Source, DATA, SIZE), "zip_source_close": (INT, Source),
    "zip_source_stat": (INT, Source, STAT), "zip_stat_init": (None, STAT),
    "zip_open_from_source": (Archive, Source, INT, ERROR), "zip_get_error": (ERROR, Archive),
    "zip_close": (INT, Archive), "zip_discard": (None, Archive),
    "zip_get_num_entries": (LONG, Archive, FLAGS), "zip_stat_index": (INT, Archive, INDEX, FLAGS, STAT),
    "zip_fopen_index": (File, Archive, INDEX, FLAGS), "zip_fread": (LONG, File, DATA, SIZE),
    "zip_file_get_error": (ERROR, File), "zip_fclose": (INT, File),
    "zip_file_add": (LONG, Archive, TEXT, Source, FLAGS),
    "zip_set_file_compression": (INT, Archive, INDEX, ctypes.c_int32, FLAGS),
    "zip_file_set_comment": (INT, Archive, INDEX, TEXT, SHORT, FLAGS), "zip_set_archive_comment": (INT, Archive, TEXT, SHORT),
    "zip_file_extra_field_set": (INT, Archive, INDEX, SHORT, SHORT, DATA, SHORT, FLAGS),
    "zip_file_set_mtime": (INT, Archive, INDEX, ctypes.c_long, FLAGS),
}


def load():
    """\\returns the library, None where there is none"""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("zip") or "libzip.so.4")
    except OSError:
        return None
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = load()


def said(error):
    return LIBRARY.zip_error_strerror(error).decode("latin1")


@contextlib.contextmanager
def buffered(data):
    """A source of bytes that outlive it, or one to write into."""
    error = Error()
    LIBRARY.zip_error_init(error)
    source = LIBRARY.zip_source_buffer_create(data, len(data or b""), 0, error)
    try:
        if not source:
            raise Refused(said(error))
        yield source
    finally:
        if source:
            LIBRARY.zip_source_free(source)
        LIBRARY.zip_error_fini(error)


def opened(source, flags):
    """\\returns an archive, to be given back by zip_discard or zip_close; the source stays its maker's"""
    error = Error()
    LIBRARY.zip_error_init(error)
    try:
        archive = LIBRARY.zip_open_from_source(source, flags, error)
        if not archive:
            raise Refused(said(error))
        LIBRARY.zip_source_keep(source)
        return archive
    finally:
        LIBRARY.zip_error_fini(error)


def checked(archive, result):
    if isinstance(result, int) and result < 0 or isinstance(result, ctypes.c_void_p) and not result:
        raise Refused(said(LIBRARY.zip_get_error(archive)))
    return result


def content(archive, index, most):
    """\\returns the bytes read of a member, up to `most` bytes, and the error at its end, if there is one"""
    file = checked(archive, LIBRARY.zip_fopen_index(archive, index, 0))
    try:
        found, buffer = bytearray(), ctypes.create_string_buffer(1 << 16)
        while (count := LIBRARY.zip_fread(file, buffer, len(buffer))) > 0:
            found += buffer.raw[:count]
            if len(found) > most:
                raise Refused("more content than there can be")
        if count == 0:
            return bytes(found), None
        error = LIBRARY.zip_file_get_error(file)
        return bytes(found), (LIBRARY.zip_error_code_zip(error), said(error))
    finally:
        LIBRARY.zip_fclose(file)


def read(data, sound=False):
    """\\param sound  everything must be read, and no fault be found
    \\returns members by name as libzip finds them"""
    # libzip reads the tail of a file first. Before 1.11 it adds that place to the one of a zip64 end record when it checks,
    # and finds that wrong.
    strict = sound and (len(data) <= oddities.TAIL or ZIP64_END not in data)
    with buffered(data) as source:
        archive = opened(source, RDONLY | CHECKCONS if strict else RDONLY)
        try:
            count = LIBRARY.zip_get_num_entries(archive, 0)
            return by_name(member(archive, index, len(data), sound) for index in range(count))
        finally:
            LIBRARY.zip_discard(archive)


def member(archive, index, most, sound):
    stat = Stat()
    LIBRARY.zip_stat_init(stat)
    checked(archive, LIBRARY.zip_stat_index(archive, index, ENC_RAW, stat))
    found = {"name": stat.name.hex(), "bytes": stat.size, "method": stat.comp_method, "crc": stat.crc}
    if stat.encryption_method != 0:
        found["method"] = AES  # Of encrypted members libzip reports the method that an extra field gives.
        return found
    if stat.comp_method != STORE and not sound:
        return found  # We do not read it either.
    data, error = content(archive, index, most if stat.comp_method == STORE else MOST)
    wrong = error is not None and error[0] == ER_CRC
    if error is not None and (sound or not wrong):
        raise Refused(error[1])
    if stat.comp_method == STORE:
        # libzip does not look at checksums of nothing. This project reads a checksum of 0 as "not computed".
        wrong = wrong or not data
        found.update(content=zlib.crc32(data), sum=None if wrong and stat.crc != 0 else zlib.crc32(data))
    return found


def told(answer, data):
    """The same from the output of differential_probe."""
    members = []
    for one in answer["members"]:
        found = {key: one[key] for key in ("name", "bytes", "method", "crc")}
        if one["method"] == STORE:
            found.update(content=zlib.crc32(data[one["payload"]:one["payload"] + one["bytes"]]), sum=one["sum"])
        members.append(found)
    return by_name(members)


def by_name(members):
    return sorted(members, key=lambda one: one["name"])


def pickier(data, why):
    """Features that libzip rejects with `why`, and that zipfile, torch and this project never use; None if there is
    none."""
    for numbers, _, extra, comment in oddities.entries(data)[2]:
        flags, method, disk = numbers[2], numbers[3], numbers[12]
        elsewhere = [numbers[i] for i in (7, 8, 15)].count(oddities.ONES32)  # sizes and offset
        wide = [body for number, body in oddities.fields_of(extra) if number == oddities.ZIP64]
        # Before any member is read, libzip looks up the cipher. This project lists it as any method but the stored.
        if method == AES and ("Encryption method not supported" in why or INCONSISTENT in why):
            return "method 99, a cipher, without a field that says which"
        # The flag is for name and comment. We take it to be right for the name alone.
        if flags & 0x800 and not is_text(comment) and INCONSISTENT in why:
            return "comments that are not in UTF-8 though flags say so"
        # Both sizes, the offset and the disk are there if their 32 or 16 bits are all ones, and nothing else is.
        if elsewhere and len(wide[0]) != 8 * elsewhere + (4 if disk == oddities.ONES16 else 0) and INCONSISTENT in why:
            return "zip64 fields with more than is needed, or without the disk"
    return None


def is_text(comment):
    try:
        return not any(ord(c) < 32 and c not in "\t\r\n" for c in comment.decode())
    except UnicodeDecodeError:
        return False


def make(choose):
    """\\returns the archive, and True if docs/formats/pt.md requires readers to accept it"""
    sound, names, kept = True, set(), []
    with buffered(None) as source:
        archive = opened(source, CREATE | TRUNCATE)
        try:
            for _ in range(choose.choice((1, 1, 2, 3, 5, 20))):
                name = archives.any_name(choose)
                if choose.randrange(60) == 0:
                    name = choose.choice(archives.UNSAFE)
                    sound = False
                if name.lower() in names:
                    continue
                names.add(name.lower())
                raw = name.encode()
                if "ü" in name and choose.randrange(9) == 0:
                    raw = name.encode("cp437")
                    sound = False  # Not UTF-8.
                kept.append(choose.randbytes(choose.choice((0, 1, 11, 99, 101, 5000))))
                add(choose, archive, raw, kept[-1])
            if choose.randrange(4) == 0:
                comment = choose.choice(("c", "ü" * 15, "日" * 1000, "x" * 65535)).encode()
                checked(archive, LIBRARY.zip_set_archive_comment(archive, comment, len(comment)))
            checked(archive, LIBRARY.zip_close(archive))
        except BaseException:
            LIBRARY.zip_discard(archive)
            raise
        return whole(source), sound


def add(choose, archive, name, data):
    """\\param data  stays until the archive is closed"""
    source = checked(archive, LIBRARY.zip_source_buffer(archive, data, len(data), 0))
    index = LIBRARY.zip_file_add(archive, name, source, 0)
    if index < 0:
        LIBRARY.zip_source_free(source)
        checked(archive, index)
    method = choose.choice((STORE, STORE, DEFLATE, DEFAULT))
    checked(archive, LIBRARY.zip_set_file_compression(archive, index, method, choose.choice((0, 1, 9))))
    checked(archive, LIBRARY.zip_file_set_mtime(archive, index, choose.randrange(1 << 31, 1 << 32), 0))
    # With a comment in no known encoding a name that is not ASCII gets a field that repeats it in UTF-8.
    comment = choose.choice((b"", b"", "grün".encode(), choose.randbytes(9)))
    if comment:
        checked(archive, LIBRARY.zip_file_set_comment(archive, index, comment, len(comment), 0))
    for where in (LOCAL, CENTRAL, LOCAL | CENTRAL):
        if choose.randrange(4) == 0:
            field = choose.randbytes(choose.choice((0, 1, 40)))
            number = choose.choice((0x4246, 0xCAFE))
            checked(archive, LIBRARY.zip_file_extra_field_set(archive, index, number, NEW_FIELD, field, len(field), where))


def whole(source):
    """\\returns the bytes written into a source"""
    stat = Stat()
    LIBRARY.zip_stat_init(stat)
    if LIBRARY.zip_source_stat(source, stat) != 0 or LIBRARY.zip_source_open(source) != 0:
        raise Refused(said(LIBRARY.zip_source_error(source)))
    try:
        buffer = ctypes.create_string_buffer(stat.size)
        if LIBRARY.zip_source_read(source, buffer, stat.size) != stat.size:
            raise Refused(said(LIBRARY.zip_source_error(source)))
        return buffer.raw
    finally:
        LIBRARY.zip_source_close(source)
