# SPDX-License-Identifier: Apache-2.0
"""Computes the fields of a row's value from the results of its commands.

Templates read results directly: {0.size.persist.ratio:1%} is a member of the first command's `result`. A function is
needed only for values that combine several members. It gets the commands and a function that runs one of them and
returns its `result`. It returns the fields of the template by name.
"""

import itertools
import json
import math
import re
import string

UNITS = {"%": (100, " %"), "GB": (1e-9, " GB"), "G": (1e-9, " G"), "M": (1e-6, " M"), "Gi": (2**-30, " · 2^30"),
         "MiB": (2**-20, " MiB"), "s": (1, " s"), "ms": (1000, " ms"), "": (1, "")}


class View:
    """A value of a report: members by name or index, formatted as DIGITS and UNIT."""

    def __init__(self, value):
        self.inner = value

    def __getattr__(self, name):
        return View(self.inner[name])

    def __getitem__(self, index):
        return View(self.inner[str(index)] if isinstance(self.inner, dict) else self.inner[index])

    def __format__(self, spec):
        if not spec:
            return str(self.inner)
        digits, unit = re.fullmatch(r"(\d)(\D*)", spec).groups()
        factor, name = UNITS[unit]
        return f"{self.inner * factor:.{digits}f}{name}"


def rendered(template, results, fields):
    """\\returns the template with members of the results and with the fields"""
    views = {name: View(value) for name, value in fields.items()}
    return string.Formatter().vformat(template, [View(result) for result in results], views)


def from_results(function):
    """A function of the results of all commands."""
    return lambda commands, run, folder: function([run(command) for command in commands])


def listed(values):
    return ", ".join(str(value) for value in values)


@from_results
def experts_per_rank(results):
    """Experts of a layer on each expert-parallel rank."""
    return {"experts": listed(result["experts"][0] // result["ep"] for result in results)}


@from_results
def selection_by_rank(results):
    """Selected experts as LAYER-EXPERT by rank. Each rank has one expert; MoE layers have the numbers 1, 3, 5, ..."""
    (result,) = results
    fields = {}
    for checkpoint in result["selection"]["checkpoints"]:
        ranks = {}
        for layer, experts in checkpoint["layers"].items():
            for expert in experts:
                ranks.setdefault(expert, []).append(f"{2 * int(layer) + 1}-{expert}")
        fields[f"t{checkpoint['t']}"] = listed(f"{' and '.join(ranks[rank])} on rank {rank}" for rank in sorted(ranks))
    return fields


@from_results
def bytes_of_ranks(results):
    share = results[0]["shares"][0]
    return {"alone": listed(share["unshared_rank_bytes"]), "shared": listed(share["rank_bytes"])}


@from_results
def plt_by_k(results):
    rows = [result["rows"][0] for result in results]
    return {"plt": listed(f"{100 * row['plt']:.2f} %" for row in rows)}


@from_results
def dynamic_k(results):
    """The constant and the dynamic K of one run."""
    constant, dynamic = results[0]["rows"]
    return {"constant": constant["plt"], "dynamic": dynamic["plt"],
            "ks": listed(step["k"] for step in dynamic["dynamic"]["history"]), "faults": len(results[0]["faults"])}


@from_results
def tokens_at_risk(results):
    popular, turns = (result["rows"][0] for result in results)
    return {"ratio": turns["risk_mean"] / popular["risk_mean"], "turns": turns["risk_max"],
            "popular_mean": popular["risk_mean"], "turns_mean": turns["risk_mean"]}


def eighth_snapshot(result):
    """Seconds of a snapshot with an eighth of the experts, in which ranks divide the work."""
    by_k, whole = result["bottleneck_bytes_by_k"], result["checkfreq"]
    return by_k[len(by_k) // 8 - 1] * whole["snapshot_s"] / whole["snapshot_bottleneck_bytes"]


@from_results
def passes(results):
    """Forward and backward passes, and undivided snapshots of all experts and divided ones of an eighth, in seconds.
    With several results also how many times both grow from one to the next."""
    pass_s = [result["times"]["forward_backward_s"] for result in results]
    all_s = [result["checkfreq"]["snapshot_s"] for result in results]
    return {"pass": listed(f"{one:.2f}" for one in pass_s), "all": listed(f"{one:.2f}" for one in all_s),
            "eighth": listed(f"{eighth_snapshot(result):.2f}" for result in results),
            "pass_grow": listed(f"{after / before:.2f}" for before, after in itertools.pairwise(pass_s)),
            "all_grow": listed(f"{after / before:.2f}" for before, after in itertools.pairwise(all_s))}


def checked(results):
    """Sums over the `ucp-load --check` commands."""
    checks = [result for result in results if result and "tensors_equal" in result]
    return {"checks": len(checks), "equal": sum(check["tensors_equal"] for check in checks),
            "different": sum(check["tensors_different"] for check in checks)}


equal_tensors = from_results(checked)


def elements_by_rank(result):
    """Elements of one state in each file, from `ucp-extract --explain`."""
    (fragment,) = result["tensors"][0]["fragments"]
    return listed(part["elements"] for part in fragment["byte_ranges"])


@from_results
def explained(results):
    found = [elements_by_rank(result) for result in results if result and "tensors" in result]
    return {"first": found[0], "last": found[-1]} | checked(results)


@from_results
def split_rules(results):
    """Counts parameters by kind of sharding rule, from `ucp-extract --list`."""
    counts = {}
    for parameter in next(result for result in results if result and "parameters" in result)["parameters"]:
        split = parameter["split"]
        kind = ("fused experts" if "view" in split else "sub" if split.startswith("sub-tensors") else
                "several dimensions" if split.startswith("mesh") else split.split(" (")[0])
        counts[kind] = counts.get(kind, 0) + 1
    return {"rules": listed(f"{kind} {count}" for kind, count in sorted(counts.items()))} | checked(results)


@from_results
def expert_bytes(results):
    """Bytes of an expert's state."""
    each = []
    for result in results:
        parts = result["size"]["full"]["expert"]
        each.append(sum(parts.values()) / (result["experts"][0] * len(result["moe_layers"])))
    return {"sizes": listed(f"{size / 2**20:.0f} MiB" for size in each)}


@from_results
def parameters(results):
    """Numbers of parameters, from plans with one byte for each."""
    return {"counts": listed(f"{result['size']['full']['bytes'] / 1e9:.3f} G" for result in results)}


def plan_file(folder):
    return json.loads((folder / "plan.json").read_text(encoding="utf-8"))


def experts_by_gpu(commands, run, folder):
    for command in commands:
        run(command)
    devices = plan_file(folder)["layers"][0]["devices"]
    return {"gpus": listed(f"{' and '.join(map(str, experts))} on GPU {gpu}" for gpu, experts in enumerate(devices))}


def owners(commands, run, folder):
    """Experts that GPUs own, by layer and in all layers together."""
    for command in commands:
        run(command)
    layers = [[sum(expert >= 0 for expert in gpu) for gpu in layer["owners"]] for layer in plan_file(folder)["layers"]]
    total = [sum(counts) for counts in zip(*layers)]
    return {"least": min(map(min, layers)), "most": max(map(max, layers)), "total_least": min(total),
            "total_most": max(total)}


def share_of_two(commands, run, folder):
    """Largest share of a layer's tokens that two experts have, over all records and layers."""
    shares = []
    for command in commands:
        run(command)
        shares += [sum(sorted(layer["loads"])[-2:]) / sum(layer["loads"]) for layer in plan_file(folder)["layers"]]
    return {"share": max(shares)}


@from_results
def survival(results):
    """Survived shares of 1 to 7 failures, by command."""
    shares = [result["plan"]["recovery"]["survived"][1:8] for result in results]
    return {f"r{index}": listed(f"{100 * share:.0f}" for share in row) for index, row in enumerate(shares)}


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


@from_results
def speedups_of_models(results):
    """Speed-ups of whole iterations: of the first four models, and of the other four."""
    ratios = [result["plan"]["times"]["speedup"] for result in results]
    return {"first": span(ratios[:4]), "second": span(ratios[4:] or ratios)}


@from_results
def all_to_all_time(results):
    before, after = (sum(layer["all_to_all_seconds"] for layer in result["plan"]["times"]["layers"]) for result in results)
    return {"ratio": before / after}


@from_results
def memory_of_copies(results):
    """Memory of the fullest GPU against expert parallelism, with copies and with re-materialization."""
    memory = results[0]["plan"]["memory"]
    kept, dropped, plain = memory["gpu"], memory["rematerialized_gpu"], memory["vanilla_gpu"]
    return {"weights": kept["weight_bytes"] / plain["weight_bytes"], "all": kept["bytes"] / plain["bytes"] - 1,
            "less": (kept["weight_bytes"] - dropped["weight_bytes"]) / (kept["weight_bytes"] - plain["weight_bytes"]),
            "again": dropped["bytes"] / plain["bytes"] - 1}


@from_results
def rematerialized(results):
    times = results[0]["plan"]["times"]
    return {"slower": times["rematerialized_seconds"] / times["seconds"] - 1}


@from_results
def speedup_of_copies(results):
    without, with_copies = (result["plan"]["times"]["seconds"] for result in results)
    return {"ratio": without / with_copies}


@from_results
def volumes(results):
    (layer,) = results[0]["plan"]["volumes"]
    return {"gathered": max(layer["gather_in_experts"]), "bound": layer["bound_experts"],
            "reduced": layer["all_reduce_experts"], "twice": 2 * layer["bound_experts"]}


def transfers(commands, run, folder):
    """Experts copied after the loss of nodes, for every set of them that loses no expert.

    The first command makes a plan of ten nodes. The second one replans with lost-N.json, in which N nodes are dead."""
    before, after = commands
    run(before)
    cluster, lost = re.search(r"--cluster (lost-(\d)\.json)", after).groups()
    copied = []
    for dead in itertools.combinations(range(10), int(lost)):
        nodes = [{"name": f"node{n}", "alive": n not in dead} for n in range(10)]
        (folder / cluster).write_text(json.dumps({"nodes": nodes, "gpus": 1, "slots": 6}), encoding="utf-8")
        migration = run(after)["plan"]["migration"]
        if not migration["lost"]:
            copied.append(migration["transfers"])
    return {"sets": len(copied), "all": math.comb(10, int(lost)), "least": min(copied), "most": max(copied)}
