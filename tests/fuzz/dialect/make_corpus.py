#!/usr/bin/env python3
"""Writes the seed inputs of the dialect fuzz targets: make_corpus.py FOLDER. Same bytes every time.

Catalogues are stored as their form, a byte, and what they hold when unpacked: that of the demo checkpoint, and small
ones.
"""

import json
import pathlib
import sys
import zipfile

DEMO = pathlib.Path(__file__).resolve().parents[2] / "data" / "demo"
MODEL = (b"mp_rank_00_model_states.pt", b"\x80\x02}.", [b"four"])
HAS_SUM, KEY_IS_INDEX, INLINE_BYTES = 1, 2, 16

ALL_KEYS = {
    "version": 1, "family": "all_keys", "note": "every key once", "requires": [r"a|model\..*"],
    "requires_shapes": [{"match": "model.*", "dim": 0, "times": 6, "of": r"layers.*", "of_dim": 0}],
    "rules": [
        {"match": "a", "split": "dim", "dim": 0, "uneven": True, "note": "x"},
        {"match": r".*c_attn\.bias", "split": "sub", "dim": 0, "ratio": [1, 1, 1]},
        {"match": r".*embed.*", "split": "dim", "dim": 0, "padded": True, "rows": 90, "granule": 4},
        {"match": r"layers.*", "split": "sub", "dim": 1, "view": [2, 8, -1], "sizes": [4, 2, 2], "granule": [2, 1, 1], "uneven": True},
        {"match": r".*norm.*", "split": "average"},
        {"match": r".*", "split": "replicated"},
    ],
}


def number(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def text(content):
    return number(len(content)) + content


def catalogue(dialect, files, form=4):
    """files: (name, pickle, [payload]); payloads lie one after the other, small ones are inlined. The form comes first."""
    out = number(["deepspeed", "universal"].index(dialect)) if form < 3 else text(dialect.encode())
    out += text(b"global_step1") + number(1) + text(b"a warning") + text(b"") + number(len(files))
    for index, (name, pickle, payloads) in enumerate(files):
        size = sum(map(len, payloads)) + 1
        out += text(name) + text(b"/source/" + name) + number(size) + number(2) + number(7)
        if form >= 3:  # one container; in form 4 its skeleton is a new one; a pickle, from the beginning
            out += number(1) + (number(index) if form == 4 else b"") + number(0) + number(0)
        out += number(size) + text(pickle) + number(len(payloads))
        for payload in payloads:
            out += number(KEY_IS_INDEX | HAS_SUM) + number(0) + number(len(payload)) + b"\x01\x02\x03\x04"
        small = [(i, payload) for i, payload in enumerate(payloads) if len(payload) <= INLINE_BYTES]
        out += number(len(small)) + b"".join(number(i) + text(payload) for i, payload in small)
    return bytes([form]) + out + (number(0) + number(0) if form > 1 else b"")


def stored(path):
    """(name, pickle, [payload]) of a file that torch.save wrote."""
    with zipfile.ZipFile(path) as file:
        root = file.namelist()[0].split("/")[0]
        keys = sorted(int(name.rsplit("/", 1)[1]) for name in file.namelist() if "/data/" in name)
        assert keys == list(range(len(keys)))
        return (path.name.encode(), file.read(f"{root}/data.pkl"), [file.read(f"{root}/data/{key}") for key in keys])


def main():
    folder = pathlib.Path(sys.argv[1])
    inputs = {
        "fuzz_patterns/all_keys": json.dumps(ALL_KEYS).encode(),
        "fuzz_patterns/empty": b'{"version": 1, "family": "x", "note": "", "requires": [], "rules": []}',
        "fuzz_catalogue/empty": catalogue("deepspeed", []),
        "fuzz_catalogue/deepspeed": catalogue("deepspeed", [MODEL]),
        "fuzz_catalogue/form1": catalogue("deepspeed", [MODEL], form=1),
        "fuzz_catalogue/form3": catalogue("deepspeed", [MODEL], form=3),
        "fuzz_catalogue/universal": catalogue("universal", [(b"zero/w/fp32.pt", b"\x80\x02}.", [b"four", b"more"])]),
        "fuzz_catalogue/demo": catalogue("deepspeed", [stored(path) for path in sorted(DEMO.glob("*/*.pt"))]),
    }
    for name, content in inputs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
