# SPDX-License-Identifier: Apache-2.0
"""Verifies a description: the trainer makes a checkpoint and resumes it, the commands convert it, and the trainer of
the target resumes the output. Its state, and its next losses, must be those of the control."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import in_deepspeed  # first: it makes the modules of the DeepSpeed tests importable
import build
import commands
import in_torch
import ranks
import switches
import torch
import trees

SECONDS = 1200  # until a trainer is taken to hang
# Other numbers of ranks add gradients up in another order. In 16 bits a rounding differs more, and Adam makes whole steps of
# gradients that are nearly zero: the first loss is that of the loaded weights, those after it are of steps.
TOLERANCE = {"fp32": (5e-5, 5e-5), "bf16": (3e-2, 6e-2), "fp16": (1e-2, 6e-2)}


class Wrong(Exception):
    """An error in a case. Two descriptions with the same fault have the same `kind`."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


def short(case):
    """A description in a line."""
    if case["program"] == "megatron":
        return json.dumps({"model": case["model"], "run": case["run"], "targets": case["targets"]})
    parts = []
    for part in case["parts"]:
        more = [f"{key}={value}" for key, value in part.items() if key not in ("path", "kind", "bias", "inner") and value is not False]
        parts.append(f"{part['path']}:{part['kind']}" + (f"({', '.join(more)})" if more else ""))
    keys = {key: value for key, value in case["run"].items() if value not in (None, False)}
    return f"{case['program']} {keys}, {case['optimizer']['kind']} with {case['optimizer']['groups']} groups, {' '.join(parts)}"


def load_tree(path):
    return torch.load(path, weights_only=False)


def last_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    errors = [line for line in errors if "gloo" not in line] or errors  # these lost the rank that failed
    return (errors or lines or ["no output"])[-1][:400]


def attempt(what, function, *arguments):
    try:
        return function(*arguments)
    except RuntimeError as error:
        if switches.debug():
            print(error, flush=True)
        raise Wrong(f"{what}: {last_line(error).split(':')[0]}", f"{what}: {last_line(error)}") from error


def in_ranks(world, function, *arguments):
    return ranks.run(world, function, *arguments, seconds=SECONDS)


class Megatron:
    """A process of Megatron's environment that trains for all cases (in_megatron.py)."""

    def __init__(self):
        python = pathlib.Path(sys.prefix) / "trainers/bin/python"
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
        self.process = subprocess.Popen([python, "-W", "ignore", pathlib.Path(__file__).with_name("in_megatron.py")], env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    @staticmethod
    def is_there():
        return (pathlib.Path(sys.prefix) / "trainers/bin/python").exists()

    def ask(self, job):
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"Megatron's process ended with {self.process.wait()}")
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Case:
    """A description with the folder of its run."""

    def __init__(self, case, ucp, folder, megatron):
        self.case, self.ucp, self.folder, self.megatron = case, ucp, folder, megatron
        self.words = []       # commands that were run
        self.outcomes = []    # of each target
        self.idle = set()     # parameters without states in the run that made the checkpoint
        self.run = case["run"]

    def command(self, *words):
        words = [str(word) for word in words]
        self.words.append(shlex.join(words))
        return self.ucp.try_run(*words)

    # ---- the run itself ---------------------------------------------------------------------------------------------

    def make(self):
        """Trains and saves, and resumes the checkpoint as it is: the control."""
        if self.case["program"] == "megatron":
            self.make_in_megatron()
            return
        program = {"deepspeed": in_deepspeed, "torch": in_torch}[self.case["program"]]
        attempt("the trainer itself", in_ranks, self.run["ranks"], program.make, str(self.folder), self.case)
        left_out = (False, str(self.folder / "live.pt")) if has_left_out_late(self.case) else ()
        again = attempt("the trainer's control", in_ranks, self.run["ranks"], program.resume, str(self.folder / "ckpt"), self.case,
                        self.run, str(self.folder / "control.pt"), *left_out)
        self.control_items = again if isinstance(again, dict) else {}
        self.losses = self.control_items.get("losses", again)
        self.control = load_tree(self.folder / "control.pt")
        live = load_tree(self.folder / "live.pt")["optim"]
        self.idle = {name for name, states in live.items() if not states.keys() - {"fp32"}}
        if self.case["program"] == "torch":
            trees.drop_states(self.control["optim"], self.idle)

    def make_in_megatron(self):
        losses = self.in_megatron("the trainer itself", "make", self.run, output=self.folder / "ckpt", tree=self.folder / "live")
        if not switches.resumes_itself(self.case):
            self.losses, self.control = losses, load_tree(self.folder / "live.pt")
            del self.control["common"]["args"]  # a run that resumes has others
            return
        self.losses = self.in_megatron("the trainer's control", "resume", self.run, source=self.folder / "ckpt",
                                       tree=self.folder / "control")
        self.control = load_tree(self.folder / "control.pt")
        wrong = trees.differences(self.control["tensors"], load_tree(self.folder / "live.pt")["tensors"])
        if wrong:
            raise Wrong("the trainer's control differs", f"the trainer's own resume differs from the run: {'; '.join(wrong[:5])}")

    def in_megatron(self, what, do, layout, **paths):
        job = {"do": do, "model": self.case["model"], "layout": layout} | {key: str(path) for key, path in paths.items()}
        answer = self.megatron.ask(job)
        if "error" in answer:
            if switches.debug():
                print(answer["error"], flush=True)
            line = last_line(answer["error"])
            raise Wrong(f"{what}: {line.split(':')[0]}", f"{what}: {line}")
        return answer["losses"]

    def judge(self):
        self.make()
        code, said = self.command("ucp-load", self.folder / "ckpt", "--list")
        if code != 0:
            reason = switches.refusal(self.case, {"to": "list"}, code, said)
            if not reason:
                raise Wrong(f"list: exit code {code}", f"--list: exit code {code}\n{said}")
            self.outcomes.append(f"refused: {reason}")
            return
        for number, target in enumerate(self.case["targets"]):
            try:
                self.outcomes.append(self.convert(target, self.folder / f"to{number}"))
            except Wrong as wrong:
                raise Wrong(f"to {target['to']}: {wrong.kind}", f"{json.dumps(target)}: {wrong}") from wrong

    # ---- conversions --------------------------------------------------------------------------------------------------

    def convert(self, target, output):
        """Converts, compares with --check, resumes and compares the trees; the outcome."""
        words = self.conversion(target, output)
        for command in words:
            code, said = self.command(*command)
            if code != 0:
                reason = switches.refusal(self.case, target, code, said)
                if reason:
                    return f"refused: {reason}"
                raise Wrong(f"refused with exit code {code}", f"{shlex.join(map(str, command))}: exit code {code}\n{said}")
        try:
            getattr(self, "resumed_by_" + {"universal": "deepspeed", "dcp": "torch"}.get(target["to"], target["to"]))(target, output)
        except Wrong as wrong:
            reason = switches.trainer_cannot(target, str(wrong))
            if not reason:
                raise
            return f"refused by the trainer: {reason}"
        if target["to"] != "safetensors" and not switches.check_is_off(self.case, target):
            self.check(target, output)
        return "equal"

    def check(self, target, output):
        """Checkpoints that trainers find equal are equal for --check, too."""
        words = ("ucp-load", "--check", self.folder / "ckpt", output)
        code, said = self.command(*words)
        if code != 0 and not switches.refusal(self.case, target, code, said):
            raise Wrong(f"check: exit code {code}", f"{shlex.join(map(str, words))}: exit code {code}\n{said}")

    def conversion(self, target, output):
        source = self.folder / "ckpt"
        if target["to"] in ("deepspeed", "universal"):
            asked = f"zero={target['zero']},dp={target['ranks']}"
            if target["zero"] in (1, 2):
                asked += f",round_robin={'true' if target.get('round_robin') else 'false'}"
            elif target["zero"] == 3:
                asked += f",sub_group={target.get('sub_group') or in_deepspeed.SUB_GROUP}"
            if target.get("by") == "atoms":
                catalogue, atoms = (output.with_name(output.name + name) for name in ("-catalogue", "-atoms"))
                return [("ucp-extract", source, catalogue), ("ucp-union", catalogue, atoms),
                        ("ucp-load", atoms, output, "--format", target["to"], "--target", asked, *self.deciding(target))]
            asked = ("--target", asked, *self.deciding(target)) if target["to"] == "deepspeed" else ()
            return [("ucp-load", source, output, "--format", target["to"], *asked)]
        if target["to"] == "megatron":
            asked = ",".join(f"{key}={target[key]}" for key in ("tp", "pp", "ep", "dp", "optimizer"))
            return [("ucp-load", source, output, "--format", "megatron", "--target", asked)]
        if target["to"] == "dcp":
            replicas = {"hsdp": target["ranks"], "ddp": target["ranks"]}.get(target["engine"], 1)
            asked = f"dp_replicate={replicas},dp_shard={target['ranks'] // replicas}"
            return [("ucp-load", source, output, "--format", "dcp", "--target", asked)]
        return [("ucp-load", source, output, "--format", "safetensors", "--only", target["only"])]

    def deciding(self, target):
        """--patterns with the kinds of tensors that neither DCP nor stages 0 and 1 record, where stage 3 needs them."""
        if target["zero"] != 3 or (self.case["program"] == "deepspeed" and self.run["zero"] >= 2):
            return ()
        model = build.make_model(self.case, build.BASE)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        others = [name for name in model.state_dict() if name not in parameters]
        path = self.folder / "patterns.json"
        path.write_text(json.dumps({"family": "drawn", "frozen_parameters": [re.escape(name) for name in sorted(parameters)],
                                    "not_parameters": [re.escape(name) for name in others]}))
        return ("--patterns", path)

    # ---- what trainers find in it ---------------------------------------------------------------------------------------

    def resumed_by_deepspeed(self, target, output):
        tree, universal = output.with_name(output.name + ".pt"), target["to"] == "universal"
        losses = attempt("resumed", in_ranks, target["ranks"], in_deepspeed.resume, str(output), self.case, target, str(tree), universal)
        want, got = self.control, load_tree(tree)
        if self.case["program"] == "torch":
            got.pop("engine")
        if universal:
            want, got = ({"optim": one["optim"], "groups": one["groups"]} for one in (want, got))
        self.compare(got, want, losses, target)

    def resumed_by_megatron(self, target, output):
        tree = output.with_name(output.name + "-tree")
        losses = self.in_megatron("resumed", "resume", target, source=output, tree=tree)
        got = load_tree(f"{tree}.pt")
        if "args" not in self.control["common"]:
            del got["common"]["args"]
        self.compare(got, self.control, losses, target)

    def resumed_by_torch(self, target, output):
        tree = output.with_name(output.name + ".pt")
        found = attempt("resumed", in_ranks, target["ranks"], in_torch.resume, str(output), self.case, target, str(tree))
        want = self.control if self.case["program"] == "torch" else as_torch(self.control)
        left_out = excluded(self.case)  # each trainer has those of its own base model
        want = want | {"model": {name: value for name, value in want["model"].items() if name not in left_out}}
        lacking = [*self.control_items.get("lacking", ()), *(f"model.{name}" for name in left_out)]
        wrong = [f"{item}: missing in the checkpoint" for item in found["lacking"] if item not in lacking]
        wrong += [f"{item}: extra in the checkpoint" for item in found["more"] if item not in self.control_items.get("more", [])]
        got = load_tree(tree)
        got["model"] = {name: value for name, value in got["model"].items() if name not in left_out}
        trees.drop_states(got["optim"], self.idle)
        self.compare(got, want, found["losses"], target, wrong)

    def resumed_by_safetensors(self, target, output):
        tree = output.with_name(output.name + ".pt")
        attempt("read", in_ranks, 1, in_torch.resume_weights, str(output), self.case, str(tree))
        want = self.control["model"] if target["only"] == "weight" else as_torch(self.control, cast=False)["model"]
        got = load_tree(tree)["weights"]
        first = self.control["aliases"]  # files have one of the names of a tensor, or all
        left_out = excluded(self.case)
        want = {name: value for name, value in want.items() if torch.is_tensor(value) and name not in left_out
                and (name in got or first.get(name, name) == name)}
        self.compare({"model": got}, {"model": want}, None, target)

    def compare(self, got, want, losses, target, wrong=()):
        if "optim" in want:
            trees.same_idle_states(got["optim"], want["optim"])
        if target["to"] != self.case["program"] or target.get("by") == "atoms":
            want, got = (tree | {"groups": trees.without_tensor_numbers(tree["groups"])} if "groups" in tree else tree
                         for tree in (want, got))
        wrong = [*wrong, *trees.differences(got, {key: value for key, value in want.items() if key in got or key != "engine"})]
        wrong = [line for line in wrong if not switches.accepted(self.case, target, line)]
        if wrong:
            kind = "tree " + " ".join(sorted({line.split("/")[1] + line.rsplit(":", 1)[1][:8] for line in wrong if "/" in line})[:3])
            raise Wrong(kind, "; ".join(wrong[:12]))
        if losses is not None:
            self.compare_losses(losses, target)

    def compare_losses(self, losses, target):
        count = switches.comparable_losses(self.case, target, len(losses))
        pairs = list(zip(losses, self.losses))[:count]
        off = [abs(a - b) / max(1, abs(b)) for a, b in pairs]
        dtype = "bf16" if self.case.get("model", {}).get("bf16") else in_deepspeed.dtype_of(self.case)
        first, later = TOLERANCE[dtype]
        if not all(one <= (later if step else first) for step, one in enumerate(off)):
            raise Wrong("losses", f"losses {losses}, expected {self.losses}")


def has_left_out_late(case):
    """True if a checkpoint leaves out weights but has their masters."""
    return case["run"].get("excluded") and any(part.get("late") for part in case["parts"])


def excluded(case):
    """The names of parameters that a checkpoint leaves out."""
    if not case["run"].get("excluded"):
        return ()
    model = build.make_model(case, build.BASE)
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


def as_torch(tree, cast=True):
    """The tree of a DeepSpeed engine, as a trainer in fp32 has it: trained weights are the masters."""
    masters = {name: states["fp32"] for name, states in tree["optim"].items() if "fp32" in states}
    aliases = tree.get("aliases", {})
    model = {}
    for name, value in tree["model"].items():
        master = masters.get(aliases.get(name, name))
        if master is not None:
            value = master.reshape(value.shape)
        elif cast and torch.is_tensor(value) and value.is_floating_point():
            value = value.float()
        model[name] = value
    return {"model": model, "optim": tree["optim"], "groups": tree["groups"], "aliases": aliases}


def judged(case, ucp, megatron=None):
    """(outcomes, None), or (outcomes, Wrong) with the commands in it."""
    scratch = commands.Scratch()
    run = Case(case, ucp, scratch.path, megatron)
    try:
        run.judge()
        return run.outcomes, None
    except Wrong as wrong:
        wrong.words = run.words
        return run.outcomes, wrong
    finally:
        scratch.close()
