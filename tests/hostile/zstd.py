# SPDX-License-Identifier: Apache-2.0
"""Streams of zstd, by the library itself: Python has no module for them yet."""

import ctypes
import functools

MOST = 16 << 20  # bytes that come out of a stream of the samples


@functools.cache
def library():
    loaded = ctypes.CDLL("libzstd.so.1")
    for function in (loaded.ZSTD_compress, loaded.ZSTD_decompress, loaded.ZSTD_compressBound):
        function.restype = ctypes.c_size_t
    return loaded


def called(function, data, room_bytes):
    """The output of a function of the library for some bytes, in a buffer of so many bytes."""
    room = ctypes.create_string_buffer(room_bytes)
    count = function(room, ctypes.c_size_t(room_bytes), bytes(data), ctypes.c_size_t(len(data)))
    if library().ZSTD_isError(ctypes.c_size_t(count)):
        raise ValueError("zstd has failed")
    return room.raw[:count]


def compress(data):
    def at_level_1(*arguments):
        return library().ZSTD_compress(*arguments, 1)
    return called(at_level_1, data, library().ZSTD_compressBound(ctypes.c_size_t(len(data))))


def decompress(data):
    return called(library().ZSTD_decompress, data, MOST)
