# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models as Megatron-DeepSpeed's, with tensor, pipeline and data parallelism and ZeRO-1, are converted to
other layouts and back, and resumed by real DeepSpeed.

    resume_test.py BIN [--all] [--only MODEL]...

Without --all a sample. The results are printed as a table.
"""

import argparse
import contextlib
import io
import pathlib
import sys
from unittest import mock

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import commands
import runs  # before DeepSpeed, which it prepares
from deepspeed.checkpoint import ds_to_universal

FLAGSHIP = {"tp": 2, "pp": 2, "dp": 2}
SMALL = {"tp": 2, "pp": 2}
ONE = {}
TARGETS = [ONE, {"tp": 4}, {"pp": 4}, {"dp": 8}]
# Other layouts add in another order. In bf16 every rounding of an activation then differs.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3}

# Model -> its case, the layout of its checkpoint, and how that is converted, to which layouts, in the sample and with --all.
MODELS = {
    "GPT, version 0.2": ({}, FLAGSHIP, [("direct", ONE), ("atoms", {"pp": 4})],
                         [(path, target) for path in ("direct", "atoms") for target in TARGETS]),
    "BLOOM in bf16, without universal_checkpoint_info": (
        {"bloom": True, "version": None, "dtype": "bf16"}, SMALL, [("direct", ONE)],
        [(path, target) for path in ("direct", "atoms") for target in TARGETS]),
    "GPT with SwiGLU, version 0.3, padded vocabulary": (
        {"swiglu": True, "version": 0.3, "vocab": 130}, SMALL, [("direct", {"tp": 4})],
        [("direct", {"tp": 4}), ("atoms", ONE), ("direct", {"pp": 4}), ("direct", {"dp": 8})]),
    "GPT, four stages": ({}, {"pp": 4, "dp": 2}, [], [("direct", FLAGSHIP)]),
    "GPT with an output layer of its own, version 0.4": (
        {"tied": False, "version": 0.4}, SMALL, [], [("direct", {"pp": 4}), ("atoms", {"tp": 4}), ("direct", ONE)]),
    "BLOOM, version 0.2": ({"bloom": True}, SMALL, [], [("direct", {"pp": 4}), ("atoms", {"tp": 4}), ("direct", ONE)]),
}
# Layer norms of the ranks differ: their mean is another model, so that losses are near the old ones only.
AVERAGE = {"average": True}
# DeepSpeed's universal loader loads atoms of both converters.
UNIVERSAL = [ONE, {"tp": 4}]


def settings(layout):
    """The layout as --target has it."""
    return ",".join(f"{key}={layout.get(key, 1)}" for key in ("tp", "pp", "dp"))


def upstream_union(made):
    """The universal folder that ds_to_universal makes."""
    saved, output = made / "ckpt", made / "upstream"
    tag = (saved / "latest").read_text()
    words = ["ds_to_universal", "--input_folder", str(saved / tag), "--output_folder", str(output / tag),
             "--num_extract_workers", "1", "--num_merge_workers", "1"]
    silent = io.StringIO()
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        ds_to_universal.main(ds_to_universal.parse_arguments())
    return output


class Results:
    def __init__(self):
        self.rows, self.failed = [], 0

    def add(self, model, step, outcome):
        """`outcome` is the report of a resume, or the text of a failure."""
        if not isinstance(outcome, str) and not outcome["wrong"]:
            text = f"{outcome['tensors']} tensors equal, losses differ by at most {outcome['loss_off']:.2g}"
        else:
            text = "FAILED: " + (outcome if isinstance(outcome, str) else "; ".join(outcome["wrong"][:20]))
            self.failed += 1
        self.rows.append((model, step, text))
        print(f"| {model} | {step} | {text} |", flush=True)


def resumed(checkpoint, case, made, tolerance, **options):
    """The report of a resume, or the text of a failure."""
    try:
        report = runs.resume_case(checkpoint, case, made, **options)
    except RuntimeError as failure:
        return str(failure)
    if report["loss_off"] > tolerance:
        report["wrong"].append(f"losses {report['losses']} are off by {report['loss_off']:.3g}, allowed {tolerance}")
    return report


def check_model(ucp, folder, name, results, every):
    """Source, targets, and back from the checkpoint that DeepSpeed saves after it has loaded the first target."""
    model, source, sample, targets = MODELS[name]
    chosen = targets if every else sample
    if not chosen:
        return
    runs.make_case(folder, model | source)
    tolerance = TOLERANCE[model.get("dtype", "fp32")]
    for number, (path, target) in enumerate(chosen):
        output = folder / f"{number}"
        ucp.convert(path, folder / "ckpt", output, settings(target), *(["--verify=replicas"] if path == "direct" else []))
        again = folder / f"again{number}" if number == 0 or every and path == "direct" else None
        results.add(name, f"{settings(source)} to {settings(target)}, {path}",
                    resumed(output, model | target, folder, tolerance, again=again))
        if again is None or not again.exists():
            continue
        back = folder / f"back{number}"
        ucp.convert("direct", again, back, settings(source))
        ucp.run("ucp-load", "--check", folder / "ckpt", back)
        results.add(name, f"{settings(target)}, saved again, to {settings(source)}",
                    resumed(back, model | source, folder, tolerance))


def check_average(ucp, folder, results):
    """Tensors are the mean, as DeepSpeed's converter has it, and the losses are near those of the ranks' different weights."""
    runs.make_case(folder, AVERAGE | SMALL)
    ucp.convert("direct", folder / "ckpt", folder / "mean", settings(ONE))
    results.add("GPT with averaged layer norms", f"{settings(SMALL)} to {settings(ONE)}, direct",
                resumed(folder / "mean", AVERAGE | ONE, folder, 1e-2))


def check_universal(ucp, folder, results):
    """DeepSpeed's own loader, for atoms of ucp-union and of ds_to_universal."""
    runs.make_case(folder, SMALL)
    ucp.run("ucp-union", folder / "ckpt", folder / "atoms")
    for program, atoms in (("ucp-union", folder / "atoms"), ("ds_to_universal", upstream_union(folder))):
        for target in UNIVERSAL:
            results.add("GPT, version 0.2", f"{settings(SMALL)} to {settings(target)}, {program} and the universal loader",
                        resumed(atoms, target, folder, TOLERANCE["fp32"], universal=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", choices=[*MODELS, "average", "universal"])
    given = parser.parse_args()
    results, scratch = Results(), commands.Scratch()
    ucp = commands.Commands(given.bin, "")
    chosen = given.only or [*MODELS, *(["average", "universal"] if given.all else [])]
    print("| Model | Conversion | Result |\n|---|---|---|")
    try:
        for number, name in enumerate(chosen):
            folder = scratch.path / str(number)
            if name == "average":
                check_average(ucp, folder, results)
            elif name == "universal":
                check_universal(ucp, folder, results)
            else:
                check_model(ucp, folder, name, results, given.all)
    finally:
        scratch.close()
    print(f"{len(results.rows)} resumes, {results.failed} failed")
    return 1 if results.failed or not results.rows else 0


if __name__ == "__main__":
    sys.exit(main())
