# SPDX-License-Identifier: Apache-2.0
"""Logs of gradients read and replayed without our code: the format from docs/formats/log.md, the steps by torch itself.

Digests are not worked out here (pec-save check does): that every record names the trailer of the one before it is.
"""

import collections
import json
import re
import struct

import torch

HEAD = 64


def padded(count):
    return -(-count // HEAD) * HEAD


def records_of(path, follows):
    """(text, gradients) of each record of a segment, and (index, trailer) of the last one. `follows`: those of the last one
    of the segment before."""
    data, found = path.read_bytes(), []
    assert data[:8] == b"SWGRADS1", path
    version, writer, number, index = struct.unpack_from("<IIQQ", data, 8)
    assert (version, f"{writer}-{number}.swg") == (1, path.name), (path, version, writer, number)
    expected, previous = follows or (index, bytes(16))
    assert index == expected, (path, index, expected)
    at = HEAD
    while at < len(data):
        head = data[at:at + HEAD]
        if len(head) < HEAD or head[:8] != b"SWGRADR1":
            break  # a torn tail
        found_index, kind, text_bytes, payload = struct.unpack_from("<QIIQ", head, 8)
        end = at + HEAD + text_bytes + payload + 16
        if end > len(data):
            break
        assert (found_index, head[32:48]) == (expected, previous), f"{path} at {at}: record {found_index}, {expected} expected"
        expected, previous = expected + 1, data[end - 16:end]
        if kind == 1:
            text = at + HEAD + text_bytes
            found.append((json.loads(data[at + HEAD:text]), memoryview(data)[text:text + payload]))
        at += padded(end - at)
    return found, (expected, previous)


def read(folder):
    """{(module, iteration): [(record, gradients)]} of all writers."""
    segments = collections.defaultdict(dict)
    for path in folder.glob("*.swg"):
        writer, number = map(int, re.fullmatch(r"(\d+)-(\d+)\.swg", path.name).groups())
        segments[writer][number] = path
    log = collections.defaultdict(list)
    for numbered in segments.values():
        assert sorted(numbered) == list(range(1, len(numbered) + 1)), sorted(numbered)
        follows = None
        for number in sorted(numbered):
            found, follows = records_of(numbered[number], follows)
            for record, gradients in found:
                log[record["module"], record["iteration"]].append((record, gradients))
    return log


def gradients_of(records, recovery):
    """{param: (step, gradient)} out of the records of one module and iteration, those made under one recovery."""
    params = collections.defaultdict(list)
    for record, payload in records:
        if record["recovery"] != recovery:
            continue
        at = 0
        for piece in record["pieces"]:
            assert piece["dtype"] == "float32" and not piece["zstd"]
            step = record["steps"][piece["step"]]
            assert piece["bytes"] == (0 if step["skipped"] else 4 * piece["count"])
            params[piece["param"]].append((piece["first"], step, piece, bytes(payload[at:at + piece["bytes"]])))
            at += piece["bytes"]
        assert at == len(payload)
    found = {}
    for name, pieces in params.items():
        pieces.sort(key=lambda one: one[0])
        end = 0
        for first, step, piece, _ in pieces:
            assert first == end and step == pieces[0][1], f"{name}: elements from {end} on are missing, or come twice"
            end += piece["count"]
        assert end == pieces[0][2]["elems"], name
        data = b"".join(data for *_, data in pieces)
        found[name] = (pieces[0][1], torch.frombuffer(bytearray(data), dtype=torch.float32) if data else None)
    return found


def replayed(log, module, state, first, last, recovery, computed):
    """{"PARAM/STATE": tensor} of a module at `last`, out of that after `first`: torch makes the steps, on a tensor by
    itself. computed: the type of the weights that are computed with."""
    made = {name: tensor.clone() for name, tensor in state.items() if name.startswith(module + ".")}
    weight = "fp32" if any(name.endswith("/fp32") for name in made) else "weight"
    names = sorted(name.removesuffix(f"/{weight}") for name in made if name.endswith(f"/{weight}"))
    for iteration in range(first + 1, last + 1):
        used = gradients_of(log.get((module, iteration), []), recovery)
        assert sorted(used) == names, f"{module}, iteration {iteration}: gradients of {sorted(used)}, {names} expected"
        for name in names:
            step, gradient = used[name]
            states = {key.rsplit("/", 1)[1]: tensor for key, tensor in made.items() if key.rsplit("/", 1)[0] == name}
            if not step["skipped"]:
                make_step(step, gradient, states.pop(weight), states)
    for name in names:
        if f"{name}/computed" in made:
            made[f"{name}/computed"] = made[f"{name}/{weight}"].to(computed).float()
    return made


def make_step(step, gradient, weight, states):
    """In place."""
    options = dict(step["options"])
    assert step["gradient_factor"] == 1 and not step["first_momentum"]
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    flags = {name: bool(options.pop(name)) for name in ("amsgrad", "nesterov", "maximize") if name in options}
    param = torch.nn.Parameter(weight)
    optimizer = getattr(torch.optim, step["optimizer"])([param], foreach=False, fused=False, **options, **flags)
    kept = {name: state for name, state in states.items() if name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum", "momentum_buffer")}
    optimizer.state[param] = kept if step["optimizer"] == "SGD" else kept | {"step": torch.tensor(step["count"] - 1)}
    param.grad = gradient.view_as(param)
    optimizer.step()
    assert step["optimizer"] == "SGD" or float(optimizer.state[param]["step"]) == step["count"]


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
