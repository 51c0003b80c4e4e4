#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how the loss of a mixture-of-experts language model depends on PLT, the proportion of lost tokens
(MoC-System figure 7, MoEtion figure 8).

    run.py BIN_DIR OUT [--quick]

DeepSpeed trains the model of language_model.py without interruption, once per seed. Then each policy gets the same
checkpoints up to a fault, through pec-save or an agent. pec-restore restores, and DeepSpeed continues from its output
to the end. A fault ends the training processes between two iterations; those since the last checkpoint are trained
again. OUT gets results.json, table.md, curves.svg and plt.svg. --quick runs a short training with one seed.

Exits with code 1 unless a restore of all experts gives the uninterrupted losses bit for bit, and every run with fewer
experts loses tokens, differs, and ends near the uninterrupted loss. 77: no Python with DeepSpeed (scripts/peers).
"""

import importlib.util
import os
import pathlib
import sys

sys.dont_write_bytecode = True
TESTS = pathlib.Path(__file__).resolve().parents[2]
if importlib.util.find_spec("deepspeed") is None:
    RUN = str(TESTS / "interop" / "torch_pt" / "run.sh")
    os.execv(RUN, [RUN, *sys.argv])
sys.path.insert(0, str(TESTS / "interop" / "deepspeed"))

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time

import language_model
import plot
from store import Store

EVERY = 8  # iterations between evaluations; intervals of checkpoints are multiples of it
LIMIT = 0.0375  # PLT up to which MoC-System finds the loss unchanged
TOLERANCE = 0.01  # nats per byte: a loss so near to the uninterrupted one counts as back
NEAR = 0.5  # nats: the largest spike of MoEtion's figure 8


def policy(k, interval, faults, name="sequential", levels=1, memory=None):
    """Returns a policy. Of two levels, a snapshot has k experts and the store gets one of them."""
    return {"policy": name, "k": k, "k_persist": 1 if levels == 2 else k, "interval": interval, "faults": faults,
            "levels": levels, "memory": memory}


def full_plan():
    """320 iterations and three seeds: one fault at the midpoint, and four faults."""
    middle, four = [167], [71, 135, 199, 263]
    all_seeds = [policy(k, interval, middle) for k, interval in itertools.product((1, 2, 4), (8, 32))]
    all_seeds += [policy(k, 32, middle, "load-aware") for k in (1, 2)]
    all_seeds += [policy(4, 32, middle, levels=2, memory=memory) for memory in ("kept", "lost")]
    all_seeds += [policy(k, 16, four) for k in (1, 2)]
    exact = [policy(language_model.EXPERTS, 32, middle)]
    return {"iterations": 320, "seeds": {1: exact + all_seeds, 2: all_seeds, 3: all_seeds}}


def quick_plan():
    one = [27]
    return {"iterations": 40, "seeds": {1: [
        policy(language_model.EXPERTS, 8, one), policy(1, 8, one), policy(2, 8, one, "load-aware"),
        *(policy(4, 8, one, levels=2, memory=memory) for memory in ("kept", "lost")), policy(1, 8, [19, 27])]}}


def group_of(run):
    """Returns the kind of a run, for the legend of a plot."""
    if run["levels"] == 2:
        return f"two levels, memory {run['memory']}"
    return run["policy"] + (f", {len(run['faults'])} faults" if len(run["faults"]) > 1 else "")


def name_of(run):
    k = f"K = {run['k']}" + (f" and {run['k_persist']}" if run["levels"] == 2 else "")
    return f"{group_of(run)}, {k}, I = {run['interval']}"


def recovery(segment, base, end):
    """Compares the evaluations of a restored training, before iteration `end`, with the uninterrupted ones.
    \\returns the largest excess, and the iterations until all further ones are within the tolerance (None: never)"""
    seen = [(iteration, loss - base["validation"][iteration])
            for iteration, loss in sorted(segment["validation"].items()) if iteration <= end]
    outside = [number for number, (_, excess) in enumerate(seen) if abs(excess) > TOLERANCE]
    first = outside[-1] + 1 if outside else 0
    back = seen[first][0] - segment["start"] if first < len(seen) else None
    return max(excess for _, excess in seen), back


def run_with_faults(programs, folder, run, seed, base, iterations):
    """Runs one policy from the uninterrupted run's checkpoints to the end. \\returns its row of the results"""
    store = Store(programs, folder, run)
    segment, restores = base, []
    losses, curve = dict(base["losses"]), dict(base["validation"])
    try:
        for fault, end in zip(run["faults"], [*run["faults"][1:], iterations]):
            logged = segment["start"]
            for iteration in range(logged + run["interval"], fault + 1, run["interval"]):
                store.log(segment["tokens"], logged, iteration)
                store.save(segment["folder"] / f"global_step{iteration}")
                logged = iteration
            store.log(segment["tokens"], logged, fault)
            load, result = store.restore()
            resumed = result["iteration"]
            if resumed != fault // run["interval"] * run["interval"]:
                raise RuntimeError(f"a fault after {fault} iterations resumed from {resumed}")
            checkpoints = list(range(resumed + run["interval"], end + 1, run["interval"]))
            if end == iterations:
                checkpoints = [end]
            checkpoints_folder = folder / f"from{resumed}"
            segment = language_model.run_training(seed, str(load), end, iterations, EVERY, checkpoints,
                                                  str(checkpoints_folder))
            segment["folder"] = checkpoints_folder
            if segment["start"] != resumed:
                raise RuntimeError(f"DeepSpeed continued from {segment['start']}, restored was {resumed}")
            spike, back = recovery(segment, base, end)
            restores.append({"fault": fault, "resumed": resumed, "plt": result["loss"]["plt"],
                             "fault_plt": result["loss"]["fault_plt"], "lost": result["loss"]["lost"],
                             "bytes": result["bytes"], "spike": spike, "back_within": back})
            losses.update(segment["losses"])
            curve.update(segment["validation"])
        store.log(segment["tokens"], segment["start"], iterations)
        lost = store.lost_by_the_run(segment["folder"] / f"global_step{iterations}")
    finally:
        store.end_agent(None)
    return {**run, "name": name_of(run), "group": group_of(run), "seed": seed, "plt": lost["plt"],
            "mlt_sum": lost["mlt_sum"], "tokens_of_the_run": lost["tokens_of_the_run"], "restores": restores,
            "validation_loss": segment["end"], "uninterrupted_validation_loss": base["end"],
            "difference": segment["end"] - base["end"],
            "curve": sorted(curve.items()), "training_loss": [losses[i] for i in range(1, iterations + 1)]}


def uninterrupted(folder, seed, runs, iterations):
    """Trains without a fault, and keeps the checkpoints that the runs need up to their first fault."""
    needed = {iteration for run in runs for iteration in range(run["interval"], run["faults"][0] + 1, run["interval"])}
    base = language_model.run_training(seed, None, iterations, iterations, EVERY, sorted(needed), str(folder))
    return base | {"folder": folder}


def failures(row, base):
    """Returns the reasons for which a row is not as it must be."""
    found = []
    # Equation 7 of MoC-System: every byte of a batch goes to one expert of each layer.
    routed = len(row["training_loss"]) * language_model.BATCH * language_model.SEQUENCE
    lost = sum(sum(restore["lost"]) for restore in row["restores"])
    if not math.isclose(row["plt"], lost / routed / len(language_model.EXPERT_LAYERS), abs_tol=1e-12):
        found.append(f"the store reports a PLT of {row['plt']}, but {lost} tokens were lost")
    mine = row["training_loss"], dict(row["curve"]), row["validation_loss"]
    same = mine == ([base["losses"][i] for i in sorted(base["losses"])], base["validation"], base["end"])
    if row["k"] == language_model.EXPERTS:
        if not same or row["plt"] != 0:
            found.append(f"all experts were saved, but the losses differ or PLT is not 0 ({row['plt']})")
    else:
        if same or not 0 < row["plt"] < 1:
            found.append(f"experts were not saved, but the losses are equal or PLT is {row['plt']}")
        if not all(map(math.isfinite, [*row["training_loss"], row["validation_loss"]])):
            found.append("a loss is not finite")
        elif row["difference"] > NEAR:
            found.append(f"final validation loss {row['validation_loss']:.4f}, uninterrupted {base['end']:.4f}")
        elif row["curve"][-1][1] >= base["validation"][row["restores"][0]["resumed"]]:
            found.append("the validation loss is not below that of the first restored iteration")
    return [f"seed {row['seed']}, {row['name']}: {what}" for what in found]


def compare_levels(rows):
    """Memory that survives a fault must lose fewer tokens than storage alone."""
    by_memory = {(row["seed"], row["memory"]): row["plt"] for row in rows if row["levels"] == 2}
    return [f"seed {seed}: PLT {plt} with surviving memory is not below {by_memory[seed, 'lost']}"
            for (seed, memory), plt in by_memory.items() if memory == "kept" and plt >= by_memory[seed, "lost"]]


def table(rows):
    """Returns the rows as Markdown, one line for all seeds of a policy: means, and the range of the difference."""
    lines = ["| Run | PLT | Final validation loss, minus uninterrupted | Range over seeds | Largest spike | Back within |",
             "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        restores = [restore for row in mine for restore in row["restores"]]
        change = [row["difference"] for row in mine]
        back = [restore["back_within"] for restore in restores]
        words = "not always" if None in back else f"{max(back)} iterations"
        lines.append(f"| {name} | {100 * statistics.mean(row['plt'] for row in mine):.2f} % | "
                     f"{statistics.mean(change):+.4f} | {min(change):+.4f} to {max(change):+.4f} | "
                     f"{max(restore['spike'] for restore in restores):+.4f} | {words} |")
    return "\n".join(lines) + "\n"


def shown_in_curves(rows):
    """One seed: the largest interval of sequential selection, and the runs with several faults."""
    first = [row for row in rows if row["seed"] == rows[0]["seed"] and row["k"] != language_model.EXPERTS]
    widest = max(row["interval"] for row in first)
    return [row for row in first
            if len(row["faults"]) > 1 or (row["group"] == "sequential" and row["interval"] == widest)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(exist_ok=True)
    plan, begun = quick_plan() if given.quick else full_plan(), time.monotonic()
    work = pathlib.Path(tempfile.mkdtemp(prefix="sw-loss-"))
    rows, wrong, bases = [], [], {}
    try:
        for seed, runs in plan["seeds"].items():
            base = bases[seed] = uninterrupted(work / "uninterrupted", seed, runs, plan["iterations"])
            print(f"{time.monotonic() - begun:.0f} s: seed {seed}, uninterrupted: {base['end']:.4f}", flush=True)
            for run in runs:
                (work / "run").mkdir()
                row = run_with_faults(given.bin, work / "run", run, seed, base, plan["iterations"])
                shutil.rmtree(work / "run")
                rows.append(row)
                wrong += failures(row, base)
                print(f"{time.monotonic() - begun:.0f} s: seed {seed}, {row['name']}: PLT {100 * row['plt']:.3f} %, "
                      f"{row['difference']:+.4f}", flush=True)
            shutil.rmtree(work / "uninterrupted")
        wrong += compare_levels(rows)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    results = {"setup": language_model.describe() | {"iterations": plan["iterations"], "tolerance": TOLERANCE,
                                                     "plt_limit": LIMIT, "evaluated_every": EVERY},
               "seconds": time.monotonic() - begun,
               "uninterrupted": [{"seed": seed, "validation_loss": base["end"],
                                  "curve": sorted(base["validation"].items()),
                                  "training_loss": [base["losses"][i] for i in sorted(base["losses"])]}
                                 for seed, base in bases.items()],
               "rows": rows}
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "table.md").write_text(table(rows), encoding="utf-8")
    plot.write_curves(given.out / "curves.svg", results["uninterrupted"][0]["curve"], shown_in_curves(rows))
    plot.write_plt(given.out / "plt.svg", rows, LIMIT)
    print(table(rows), end="")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
