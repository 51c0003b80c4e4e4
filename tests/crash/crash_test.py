#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills, faults, signals and rivals against the built commands.

Usage: crash_test.py BIN_FOLDER [--night] [--mpirun PROGRAM] [--limit N] [--part PART] [--case NAME]...

Parts: campaign (faults at counted calls), scenarios (signals, rivals, full disks), ranks (both
under MPI, as far as they concern it); default all. Without --night a choice
of the calls is disturbed, with it every call of every command. --case picks cases of the campaign.
"""

import argparse
import collections
import os
import pathlib
import signal
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs"))

import megatron_checkpoint  # pylint: disable=wrong-import-position
import scenarios  # pylint: disable=wrong-import-position
import tables  # pylint: disable=wrong-import-position
from campaign import Campaign, Case  # pylint: disable=wrong-import-position
from harness import (  # pylint: disable=wrong-import-position
    DATA, DEMO, Broken, Log, Scratch, expect, own_checkpoints, shown, succeed, tree, with_siblings)

# The journal writes the records of several threads at once, so only one thread has a fixed number of calls.
SERIAL = ["--threads", "1", "--io-concurrency", "1"]


def cases(programs, night, folder):
    """The commands to disturb; sources are made in `folder`."""
    load, union, extract = (programs / f"ucp-{name}" for name in ("load", "union", "extract"))
    target = ["--target", "zero=3,dp=3", *SERIAL]
    beside = with_siblings(folder / "beside")
    found = [
        Case("load", [load, DEMO], target),
        Case("load-force", [load, DEMO], target, old=[load, "--target", "zero=1,dp=3", DEMO]),
        Case("union", [union, DEMO], SERIAL),
        Case("extract", [extract, DEMO]),
        Case("pack", [extract, DEMO], ["--pack=copy", *SERIAL]),
        Case("load-siblings", [load, beside], target),
        Case("pack-siblings", [extract, beside], ["--pack=copy", *SERIAL]),
        Case("verbatim", [load, beside], SERIAL),
        Case("link", [load, beside], ["--link", *SERIAL]),
    ]
    found += cases_of_other_formats(load, night, folder)
    if night:
        found += [
            Case("load-readback", [load, DEMO], ["--target", "zero=1,dp=4", "--verify=readback", *SERIAL]),
            Case("verbatim-force", [load, DEMO], SERIAL, old=[load, "--target", "zero=1,dp=3", DEMO]),
            Case("link-force", [load, beside], ["--link", *SERIAL], old=[load, "--target", "zero=1,dp=3", beside]),
            Case("union-force", [union, DEMO], SERIAL, old=[load, DEMO]),
        ]
        wanted = {"zero1_w2": "zero=3,dp=2", "moe4_ep2_zero1_w2": "zero=2,dp=4,ep=4",
                  "pp2_dp2_zero1": "zero=1,pp=4,dp=1"}
        found += [Case(ckpt.parent.name, [load, ckpt], ["--target", wanted[ckpt.parent.name], *SERIAL])
                  for ckpt in own_checkpoints() if ckpt.parent.name in wanted]
    return found


def cases_of_other_formats(load, night, folder):
    """From and to the formats other than DeepSpeed's; a few by day."""
    nested, ranks = DATA / "dcp" / "nested_w3" / "ckpt", DATA / "dtensor" / "accelerate_w2" / "ckpt"
    legacy, dist = megatron_checkpoint.legacy(folder / "legacy"), folder / "dist"

    def case(name, source, flags, old=None):
        return Case(name, [load, source], [*flags.split(), *SERIAL], old)

    found = [case("dcp", nested, "--format dcp --target dp_shard=2"),
             case("dtensor", ranks, "--format dtensor --target dp_shard=1"),
             case("megatron", legacy, "--format megatron --target files=torch_dist")]
    if night:
        succeed([load, legacy, dist, "--format", "megatron", "--target", "files=torch_dist"])
        found += [
            case("dcp-pair", nested, "--format dcp --flavour accelerate --target dp_shard=1"),
            case("dcp-force", nested, "--format dcp --target dp_shard=2", old=[load, DEMO]),
            case("dcp-to-deepspeed", nested, "--format deepspeed --target zero=2,dp=2"),
            case("dtensor-to-deepspeed", ranks, "--format deepspeed --target zero=3,dp=2"),
            case("megatron-legacy", legacy, "--format megatron --target files=torch,pp=2"),
            case("megatron-to-megatron", dist, "--format megatron --target files=torch_dist,pp=2"),
            case("megatron-to-dcp", dist, "--format dcp --target dp_shard=2"),
        ]
    return found


def campaign(arguments, log):
    limit = arguments.limit if arguments.limit else None if arguments.night else 14
    total, rows = collections.Counter(), []
    with Scratch("crash-sources-") as folder:
        known = {case.name: case for case in cases(arguments.bin, arguments.night, folder)}
        sound = tree(folder)
        for name in arguments.case or known:
            expect(name in known, f"no case {name}; there are {', '.join(known)}")
            counts = Campaign(known[name], limit, log).go(os.cpu_count() or 1)
            total += counts
            rows.append((f"`{name}`", shown(known[name].argv("OUT")), counts["calls"], counts["kill"], counts["torn"],
                         counts["eio"] + counts["enospc"], counts["short"], counts["term"]))
        expect(tree(folder) == sound, "a source was changed")
    tables.show(("Case", "Command", "Calls", "Kills", "Torn writes", "Errors", "Short writes", "Stops"), tables.with_sum(rows, 2))
    errors = total["eio"] + total["enospc"]
    log(f"campaign: {total['kill'] + total['torn']} kills ({total['torn']} of them in the middle "
        f"of a write), {errors} errors, {total['short']} short writes, {total['term']} stops over "
        f"{total['calls']} calls; all completed to identical bytes "
        f"({total['resumed']} resumed, {total['found done']} had committed)")
    # A single case may have no call that commits before it ends.
    kinds = ["kill", "torn", "eio", "enospc", "short", "term", "resumed"]
    for kind in kinds + ([] if arguments.case else ["found done"]):
        expect(total[kind] > 0, f"the campaign had no {kind}")


def ranks_part(arguments, log):
    launcher = [arguments.mpirun, "--oversubscribe", "-n", "2"]
    case = Case("load-2-ranks", [arguments.bin / "ucp-load", DEMO],
                ["--target", "zero=3,dp=3", *SERIAL], launcher=launcher)
    Campaign(case, 50 if arguments.night else 2, log).go(1)
    scenarios.Scenarios(arguments.bin, arguments.mpirun, log, arguments.night).under_mpirun()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--night", action="store_true")
    parser.add_argument("--mpirun")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--case", action="append")
    parser.add_argument("--part", choices=["campaign", "scenarios", "ranks"])
    arguments = parser.parse_args()
    # Shells make jobs in the background ignore it, and the commands that are interrupted would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = Log()
    try:
        if arguments.part in (None, "campaign"):
            campaign(arguments, log)
        if arguments.part in (None, "scenarios"):
            scenarios.Scenarios(arguments.bin, None, log, arguments.night).go()
        if arguments.mpirun and arguments.part in (None, "ranks"):
            ranks_part(arguments, log)
    except Broken as broken:
        log(f"FAILED: {broken}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
