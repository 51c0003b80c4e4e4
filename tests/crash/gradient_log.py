# SPDX-License-Identifier: Apache-2.0
"""Logs of gradients, written as specified by docs/formats/log.md and without lib/partial/gradient_log, and steps of
AdamW in plain Python."""

import ctypes
import ctypes.util
import json
import struct

LIBRARY = ctypes.util.find_library("xxhash")


class Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def digest(data):
    xxhash = ctypes.CDLL(LIBRARY)
    xxhash.XXH3_128bits.restype = Hash
    xxhash.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    value = xxhash.XXH3_128bits(data, len(data))
    return struct.pack(">QQ", value.high, value.low)


def adamw(count, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, factor=1.0,
          skipped=False, fused=False, roots=None):
    """A step as a record lists it."""
    options = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps,
               "weight_decay": weight_decay, "amsgrad": 0, "maximize": 0}
    step = {"optimizer": "AdamW", "fused": fused, "count": count, "gradient_factor": factor,
            "skipped": skipped, "first_momentum": False, "options": options}
    return step if roots is None else {**step, "roots": roots}


def piece(param, elems, data, first=0, dtype="float32", step=0):
    """A range of a gradient; `data` is empty where the step was skipped, and `elems` then all of it."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return {"param": param, "elems": elems, "first": first,
            "count": len(data) // size if data else elems - first, "dtype": dtype, "step": step,
            "bytes": len(data), "zstd": False, "digest": digest(data).hex(), "data": data}


class Log:
    """Writes one segment at a time: open it again for the next."""

    def __init__(self, folder, fingerprint, writer=0):
        self.folder, self.fingerprint, self.writer = folder, bytes.fromhex(fingerprint), writer
        self.index, self.number, self.previous, self.parts = 0, 0, bytes(16), []
        folder.mkdir(exist_ok=True)
        self.begin()

    def begin(self):
        """The next segment."""
        self.number += 1
        head = b"SWGRADS1" + struct.pack("<IIQQ", 1, self.writer, self.number, self.index)
        head += self.fingerprint
        self.parts = [head + digest(head)]
        self.write()

    @property
    def path(self):
        return self.folder / f"{self.writer}-{self.number}.swg"

    def write(self):
        self.path.write_bytes(b"".join(self.parts))

    def record(self, iteration, module, steps, pieces, recovery=0):
        text = json.dumps({"iteration": iteration, "recovery": recovery, "module": module,
                           "steps": steps, "pieces": [{key: value for key, value in one.items()
                                                       if key != "data"} for one in pieces]})
        self.add(1, text.encode(), b"".join(one["data"] for one in pieces))

    def mark(self):
        self.add(2, b"", b"")

    def add(self, kind, text, payload):
        head = b"SWGRADR1" + struct.pack("<QIIQ", self.index, kind, len(text), len(payload))
        head += self.previous
        body = head + digest(head) + text + payload
        self.previous = digest(body)
        body += self.previous
        self.parts.append(body + bytes(-len(body) % 64))
        self.index += 1
        self.write()


def log_series(folder, fingerprint, model, iterations, steps):
    """A log of all experts of a moe_checkpoint.Model, a segment for each iteration. The gradients are any."""
    log = None
    for iteration in iterations:
        if log is None:
            log = Log(folder, fingerprint)
        else:
            log.begin()
        for layer in range(model.layers):
            for expert in range(model.experts):
                module = model.module(layer, expert)
                pieces = []
                for suffix, shape in model.expert.items():
                    data = model.data(f"{module}.{suffix}", "gradient", shape, iteration)
                    pieces.append(piece(f"{module}.{suffix}", len(data) // 4, data))
                log.record(iteration, module, [steps(iteration)], pieces)
        log.mark()
    return log


def single(value):
    """Rounded to float32. One operation on float32 in Python's doubles, rounded, is what float32 has."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def apply(step, param, first, second, gradient):
    """A step of torch's AdamW with `fused` false, on lists of float32 numbers; changes the lists."""
    if step["skipped"]:
        return
    o, count = step["options"], step["count"]
    beta1, beta2, lr = o["beta1"], o["beta2"], o["lr"]
    decay = single(1 - lr * o["weight_decay"])
    weight, rest = single(1 - beta1), single(1 - beta2)
    minus = single(-(lr / (1 - beta1 ** count)))
    correction = single((1 - beta2 ** count) ** 0.5)
    factor, eps, beta2 = single(step["gradient_factor"]), single(o["eps"]), single(beta2)
    for i, raw in enumerate(gradient):
        g = single(raw * factor)
        p = single(param[i] * decay)
        m, v = first[i], second[i]
        if abs(weight) < 0.5:
            m = single(single(weight * single(g - m)) + m)
        else:
            m = single(single(single(weight - 1) * single(g - m)) + g)
        v = single(single(single(rest * g) * g) + single(v * beta2))
        root = single(v ** 0.5) if v == v and v >= 0 else float("nan")
        divisor = single(single(root / correction) + eps)
        quotient = single(minus * m) / divisor if divisor else float("nan")
        param[i], first[i], second[i] = single(p + single(quotient)), m, v
