# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the variants of DeepSpeed are converted and resumed, or rejected by name, as variants.py defines.

    variants_test.py BIN LAUNCHER [--all] [--only NAME]... [--table]

Without --all a sample; with --table the result is printed as the table of docs/interop.md.
"""

import argparse
import re
import sys

import commands
import train
from variants import VARIANTS, Cannot, Refused, Works, Wrong

# Stage -> where to: another stage on more ranks, and a third on one.
TARGETS = {0: [(2, 3), (3, 1)], 1: [(3, 3), (2, 1)], 2: [(1, 3), (3, 1)], 3: [(2, 3), (1, 1)]}
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Warning)\b.*")


def last_error(text):
    """The error of a failed run, in a line."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    named = [line for line in lines if ERROR.match(line)]
    return (named or lines or ["nothing"])[-1][:300]


def trained(folder, case, variant):
    """Makes the checkpoint and resumes it as it is; what DeepSpeed itself fails with, or None."""
    try:
        train.make_case(folder, case, variant.ranks)
        wrong = train.resume_case(folder / "ckpt", case, variant.ranks, folder)["wrong"]
    except RuntimeError as failure:
        return last_error(failure)
    return "; ".join(wrong) or None


def converted(ucp, folder, case, variant, target):
    """The outcome of one conversion, and of resuming it."""
    stage, ranks = target
    ranks *= variant.case.get("sp", 1)
    output = folder / f"zero{stage}-dp{ranks}"
    code, said = ucp.try_run("ucp-load", folder / "ckpt", output, "--target", f"zero={stage},dp={ranks}")
    if code == 9:
        return Refused((said.partition("error: ")[2].splitlines()[0].partition(": ")[2],))  # without the file
    if code != 0:
        return Wrong((f"exit code {code}: {said}",))
    drifts = isinstance(variant.outcome, Works) and variant.outcome.drift
    try:
        report = train.resume_case(output, case | {"zero": stage}, ranks, folder, steps=1 if drifts else train.STEPS)
    except RuntimeError as failure:
        return Wrong((f"to stage {stage} on {ranks} ranks: {last_error(failure)}",))
    if report["wrong"]:
        return Wrong((f"to stage {stage} on {ranks} ranks: " + "; ".join(report["wrong"])[:600],))
    return variant.outcome if drifts else Works()


def outcomes(ucp, folder, variant, stage, targets):
    """The outcome of a variant at one stage, conversion by conversion."""
    case = train.complete(variant.case | {"zero": stage})
    failure = trained(folder, case, variant)
    if failure:
        return [Cannot((failure,))]
    return [converted(ucp, folder, case, variant, target) for target in targets]


def fits(found, expected):
    return type(found) is type(expected) and all(
        word in found.words[0] for word in getattr(expected, "words", ()))


def row(variant, found):
    """A line of the table."""
    stages = ", ".join(map(str, variant.stages))
    kinds = {Works: "works", Refused: "refused, exit 9", Cannot: "DeepSpeed cannot", Wrong: "WRONG"}
    said = {}
    for outcome in found:
        words = outcome.drift if isinstance(outcome, Works) else outcome.words[0]
        said.setdefault(kinds[type(outcome)], words)
    said = "; ".join(kind + (f" ({words})" if words else "") for kind, words in said.items())
    return f"| {variant.title} | {stages} | {said} |"


def main():
    ucp = commands.from_arguments()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", choices=VARIANTS, default=[])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    names = given.only or [name for name, variant in VARIANTS.items() if given.all or variant.sample]
    whole = given.all or given.only
    scratch = commands.Scratch()
    failed = tried = 0
    rows = []
    for name in names:
        variant, found = VARIANTS[name], []
        for stage in variant.stages if whole else variant.stages[:1]:
            targets = variant.targets or TARGETS[stage]
            found += outcomes(ucp, scratch.path / name / str(stage), variant, stage, targets if whole else targets[:1])
        tried += len(found)
        for outcome in (outcome for outcome in found if not fits(outcome, variant.outcome)):
            failed += 1
            print(f"{name}: {variant.outcome} expected, found {outcome}", flush=True)
        rows.append(row(variant, found))
        print(f"{name}: {len(found)} outcomes", flush=True)
    scratch.close()
    if given.table:
        print("\n".join(["| What | Stages | Result |", "|---|---|---|", *rows]))
    print(f"{tried} conversions and runs of {len(names)} variants, {failed} not as expected")
    return 1 if failed or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
