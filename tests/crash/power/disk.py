# SPDX-License-Identifier: Apache-2.0
"""Possible states of a disk after a power failure: a recording of the calls that changed it (record.c), and every state
that the calls which were not synced may leave."""

import hashlib
import os
import pathlib
import struct

HEAD = struct.Struct("=cxHHHQQQ")  # struct Head of record.c
SECTOR = 512

KEPT, LOST, GARBLED, SIZE_ONLY = "kept", "lost", "garbled", "its size only"


class Call:
    """A recorded call. kind: c create, m make a folder, w write, t truncate, a allocate, s sync, S sync all, r rename,
    l link, u unlink or remove a folder, p printed."""

    def __init__(self, kind, path, other, flags, inode, at, data):
        self.kind, self.path, self.other, self.flags = kind, path, other, flags
        self.inode, self.at, self.data = inode, at, data

    def __str__(self):
        what = {"c": "create", "m": "mkdir", "w": "write", "t": "truncate", "a": "allocate", "s": "sync", "S": "syncfs",
                "r": "rename", "l": "link", "u": "remove", "p": "print"}[self.kind]
        places = " ".join(path.rsplit("/", 1)[-1] for path in (self.path, self.other) if path)
        return f"{what} {places}" + (f" {len(self.data)} bytes at {self.at}" if self.kind == "w" else "")


def read_calls(file):
    data, at, calls = pathlib.Path(file).read_bytes(), 0, []
    while at < len(data):
        kind, path, other, flags, inode, place, count = HEAD.unpack_from(data, at)
        at += HEAD.size
        kind = kind.decode()
        pieces = []
        for size in (path, other, count if kind in "wp" else 0):
            pieces.append(data[at:at + size])
            at += size
        calls.append(Call(kind, pieces[0].decode(), pieces[1].decode(), flags, inode, place, pieces[2]))
    return calls


class Change:
    """A part of a call that is on the disk only once a file or folder is synced.

    of: the file or folders; a sync of one makes it durable. For a file: `bytes` or `size`; for folders: `moves`, a list
    of (folder, name, later content or None), of which all or none happen.
    """

    def __init__(self, call, of, data=None, at=0, size=None, moves=None, child=None):
        self.call, self.of = call, of
        self.data, self.at, self.size, self.moves, self.child = data, at, size, moves, child

    def ways(self):
        if self.moves is not None or self.data is None:
            return (LOST,)
        return (LOST, GARBLED, SIZE_ONLY)


def written(old, change, way, numbers):
    """The bytes of a file after a change of it."""
    if change.data is None:
        if way != KEPT:
            return old
        return old[:change.size] + bytes(change.size - len(old)) if change.size > len(old) or change.call.kind == "t" else old
    if way == LOST:
        return old
    end = change.at + len(change.data)
    new = bytearray(old)
    if end > len(new):
        new.extend(bytes(end - len(new)))
    if way == KEPT:
        new[change.at:end] = change.data
    elif way == GARBLED:
        first = change.at // SECTOR * SECTOR
        for sector in range(first, end, SECTOR):
            begin, stop = max(sector, change.at), min(sector + SECTOR, end)
            fate = numbers.randrange(3)
            if fate == 0:
                new[begin:stop] = change.data[begin - change.at:stop - change.at]
            elif fate == 1:
                new[begin:stop] = numbers.randbytes(stop - begin)
    return bytes(new)


class Disk:
    """Files and folders by number, without changes that are not durable yet, and those changes."""

    def __init__(self, root):
        """root: a folder with durable content. Its files must keep their inodes until the calls were recorded."""
        self.root = str(root)
        self.files, self.folders = {}, {}
        self.now = {}      # the folders as the running program sees them
        self.numbers = {}  # of the files that the file system has under an inode now
        self.pending = []
        self.top = self._take(pathlib.Path(root))
        self.now = {number: dict(names) for number, names in self.folders.items()}

    def _new(self, inode, content):
        number = len(self.files) + len(self.folders)
        if isinstance(content, dict):
            self.folders[number] = content
            self.now[number] = dict(content)
        else:
            self.files[number] = content
        self.numbers[inode] = number
        return number

    def _take(self, path):
        if not path.is_dir():
            inode = path.lstat().st_ino
            return self.numbers[inode] if inode in self.numbers else self._new(inode, path.read_bytes())
        number = self._new(path.lstat().st_ino, {})
        for one in sorted(path.iterdir()):
            self.folders[number][one.name] = self._take(one)
        return number

    def _place(self, path):
        """The folder and the name of an absolute path, as the program sees them."""
        folder, *rest = (self.top, *path[len(self.root) + 1:].split("/"))
        for name in rest[:-1]:
            folder = self.now[folder][name]
        return folder, rest[-1]

    def _names(self, call, moves, child=None):
        for folder, name, what in moves:
            if what is None:
                self.now[folder].pop(name, None)
            else:
                self.now[folder][name] = what
        self.pending.append(Change(call, {folder for folder, _, _ in moves}, moves=moves, child=child))

    def add(self, call):
        """The next call of the program."""
        if call.kind in "cm":
            number = self._new(call.inode, b"" if call.kind == "c" else {})
            self._names(call, [(*self._place(call.path), number)])
        elif call.kind == "l":
            self._names(call, [(*self._place(call.path), self.numbers[call.inode])])
        elif call.kind == "u":
            self._names(call, [(*self._place(call.path), None)])
        elif call.kind == "r":
            (folder, name), (to, new) = self._place(call.path), self._place(call.other)
            child = self.now[folder][name]
            moves = [(folder, name, self.now[to][new] if call.flags else None), (to, new, child)]
            self._names(call, moves, child=None if call.flags else child)
        elif call.kind == "w":
            self.pending.append(Change(call, {self.numbers[call.inode]}, data=call.data, at=call.at))
        elif call.kind in "ta":
            self.pending.append(Change(call, {self.numbers[call.inode]}, size=call.at))
        elif call.kind in "sS":
            of = None if call.kind == "S" else self.numbers[call.inode]
            durable = [one for one in self.pending if of is None or of in one.of]
            self.pending = [one for one in self.pending if of is not None and of not in one.of]
            self.files, self.folders = self.after([(one, KEPT) for one in durable], None)

    def after(self, changes, numbers):
        """Files and folders with (change, way) in this order."""
        files, folders = dict(self.files), {number: dict(names) for number, names in self.folders.items()}
        for change, way in changes:
            if change.moves is None:
                for number in change.of:
                    files[number] = written(files[number], change, way, numbers)
                continue
            if way != KEPT:
                continue
            if change.child is not None:  # wherever it is when an earlier rename was lost, it is moved
                folder, name, _ = change.moves[0]
                if folders[folder].get(name) != change.child:
                    for names in folders.values():
                        for found in [one for one, number in names.items() if number == change.child]:
                            del names[found]
            for folder, name, what in change.moves:
                if what is None:
                    folders[folder].pop(name, None)
                else:
                    folders[folder][name] = what
        return files, folders


class State:
    """A disk after a failure: file contents and folders by path below the root."""

    def __init__(self, disk, ways, numbers):
        files, folders = disk.after(ways, numbers)
        self.files, self.folders = {}, []
        todo = [(disk.top, "")]
        while todo:
            number, path = todo.pop()
            for name, child in folders[number].items():
                if child in folders:
                    self.folders.append(path + name)
                    todo.append((child, path + name + "/"))
                else:
                    self.files[path + name] = files[child]
        self.folders.sort()

    def digest(self):
        whole = hashlib.blake2b(digest_size=16)
        for path in self.folders:
            whole.update(b"d" + path.encode() + b"\0")
        for path in sorted(self.files):
            data = self.files[path]
            whole.update(b"f" + path.encode() + b"\0" + str(len(data)).encode() + b"\0" + data)
        return whole.digest()

    def write(self, root):
        """Into an empty folder."""
        for path in self.folders:
            os.mkdir(f"{root}/{path}")
        for path, data in self.files.items():
            with open(f"{root}/{path}", "wb") as out:
                out.write(data)
