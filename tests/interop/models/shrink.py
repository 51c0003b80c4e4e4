# SPDX-License-Identifier: Apache-2.0
"""Makes a description that fails smaller, as long as it fails in the same way."""

import copy
import time

SECONDS = 90  # for one description


def without(case, *path):
    """A copy of the description without an entry."""
    smaller = copy.deepcopy(case)
    at = smaller
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return smaller


def changed(case, key, **values):
    return case | {key: case[key] | values}


def without_part(case, index):
    """None if other parts have weights of this one."""
    smaller = without(case, "parts", index)
    for part in smaller["parts"]:
        for key in ("tie", "share"):
            if part.get(key) == index:
                return None
            if part.get(key, -1) > index:
                part[key] -= 1
    return smaller


def candidates(case):
    """Descriptions that lack something of this one, the largest steps first."""
    if len(case["targets"]) > 1:
        yield from (without(case, "targets", index) for index in range(len(case["targets"])))
    for index in range(len(case.get("parts", ()))):
        if len(case["parts"]) > 1:
            yield without_part(case, index)
    for index, part in enumerate(case.get("parts", ())):
        for key in part:
            if key not in ("path", "kind", "bias", "inner"):
                yield without(case, "parts", index, key)
        for at in range(len(part.get("buffers", ()))):
            if len(part["buffers"]) > 1:
                yield without(case, "parts", index, "buffers", at)
        if part["bias"]:
            yield case | {"parts": [*case["parts"][:index], part | {"bias": False}, *case["parts"][index + 1:]]}
        if part["kind"] not in ("linear", "quant") and "share" not in part:
            yield case | {"parts": [*case["parts"][:index], part | {"kind": "linear"}, *case["parts"][index + 1:]]}
    if "optimizer" in case:
        yield changed(case, "optimizer", groups=1)
        yield changed(case, "optimizer", kind="adamw")
    yield from simpler_runs(case)


def simpler_runs(case):
    """With fewer ranks and fewer options."""
    off = {"schedule": False, "excluded": False, "fp32_gradients": False, "round_robin": False, "sub_group": None,
           "units": False, "by": None, "dtype": "fp32"}
    for values in ({key: value} for key, value in off.items()):
        if all(key in case["run"] for key in values):
            yield changed(case, "run", **values)
        for index, target in enumerate(case["targets"]):
            if all(key in target for key in values):
                yield case | {"targets": [*case["targets"][:index], target | values, *case["targets"][index + 1:]]}
    if case["run"].get("ranks", 1) > 1 and case["run"].get("engine") not in ("hsdp", "ddp"):
        yield changed(case, "run", ranks=1)
    for index, target in enumerate(case["targets"]):
        if target.get("ranks", 1) > 1 and target.get("engine") not in ("hsdp", "ddp"):
            yield case | {"targets": [*case["targets"][:index], target | {"ranks": 1}, *case["targets"][index + 1:]]}


def smallest(case, wrong, judge):
    """\\param judge  the error of a description, or None. Returns the smallest description that was found, and its
    error."""
    end = time.monotonic() + SECONDS
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(case):
            if time.monotonic() > end:
                return case, wrong
            if candidate is None or candidate == case:
                continue
            found = judge(candidate)
            if found is not None and found.kind == wrong.kind:
                case, wrong, smaller = candidate, found, True
                break
    return case, wrong
