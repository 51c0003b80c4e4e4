# SPDX-License-Identifier: Apache-2.0
"""A run goes from DeepSpeed to FSDP2 and back, and every loss is that of the run that stayed.

    hops_test.py BIN LAUNCHER
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

import hops  # first: it makes the modules of the DeepSpeed tests importable
import commands
import ranks

STEPS = 2  # between two hops
TOLERANCE = 2e-5  # other numbers of ranks add gradients up in another order

# The trainers that continue: the ranks, and the stage in DeepSpeed or None in FSDP2.
HOPS = [(2, 2), (3, None), (3, 3), (2, None), (1, 1)]


class Hops(unittest.TestCase):
    ucp = None

    def scratch(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        return scratch.path

    def stay(self, family):
        """The losses of an uninterrupted run."""
        return ranks.run(2, hops.in_deepspeed, family, 2, None, None, (0, STEPS * len(HOPS)))

    def move(self, family, scratch):
        losses, source = [], None
        for hop, (world, stage) in enumerate(HOPS):
            steps = (hop * STEPS, (hop + 1) * STEPS)
            output = scratch / f"made{hop}"
            if source is not None:
                wanted = ["--format", "dcp", "--target", f"dp_shard={world}"] if stage is None else [
                    "--format", "deepspeed", "--target", f"zero={stage},dp={world}"]
                self.ucp.run("ucp-load", source, scratch / f"in{hop}", *wanted)
                self.ucp.run("ucp-load", "--check", source, scratch / f"in{hop}")
                source = scratch / f"in{hop}"
            if stage is None:
                losses += ranks.run(world, hops.in_fsdp2, family, source, output, steps)
            else:
                losses += ranks.run(world, hops.in_deepspeed, family, stage, source, output, steps)
            source = output
        return losses

    def check_but_for_samples(self, first, back):
        """The same but for the number of samples, for which DCP folders have no place."""
        said = self.ucp.run("ucp-load", "--check", first, back, expect=5)
        self.assertRegex(said, r"(?m)^consumed samples: \d+ and 0$")
        self.assertIn(" 1 difference,", said)

    def check_losses(self, what, stayed, moved, tolerance=TOLERANCE):
        """Prints how far the losses are apart, for the log."""
        apart = max(abs(a - b) for a, b in zip(stayed, moved, strict=True))
        print(f"{what}: losses differ by {apart:.2g}")
        self.assertLessEqual(apart, tolerance, f"{stayed} and {moved}")

    def test_losses_are_those_of_the_run_that_stayed(self):
        for family in ("llama", "mixtral"):
            with self.subTest(family):
                stayed, moved = self.stay(family), self.move(family, self.scratch())
                self.check_losses(f"{family}: {len(HOPS) - 1} hops", stayed, moved)

    def test_by_way_of_megatron(self):
        """The same checkpoint comes back, and every trainer that resumes from it has the losses of the run that
        stayed."""
        sizes = ("--map-sizes", "heads=4,kv_heads=2")
        families = (("llama", "llama:hf", "tp=2", 2), ("mixtral", "mixtral:hf_stacked", "ep=2,dp=2", 1),
                    ("mixtral", "mixtral:hf_stacked", "ep=2,dp=2", 3))
        for family, side, target, stage in families:
            with self.subTest(family, stage=stage):
                scratch = self.scratch()
                there = ("--map", f"{family}:megatron", *sizes)
                first, dcp, one, other, back = (scratch / name for name in ("first", "dcp", "one", "other", "back"))
                ranks.run(2, hops.in_deepspeed, family, stage, None, first, (0, STEPS))
                self.ucp.run("ucp-load", first, dcp, "--format", "dcp", "--target", "dp_shard=3")
                self.ucp.run("ucp-load", dcp, one, "--format", "megatron", "--target", target + ",optimizer=none",
                             *there)
                self.ucp.run("ucp-load", "--check", dcp, one, *there)
                self.ucp.run("ucp-load", one, other, "--format", "megatron",
                             "--target", "pp=2,optimizer=fully_reshardable")
                self.ucp.run("ucp-load", other, back, "--format", "deepspeed", "--target", "zero=3,dp=2,tp=1",
                             "--map", side, *sizes)
                self.check_but_for_samples(first, back)
                steps = (STEPS, 2 * STEPS)
                stayed = ranks.run(2, hops.in_deepspeed, family, stage, first, None, steps)
                for name, moved in (("Megatron-Core", self.in_megatron(family, one / f"iter_{STEPS:07}", steps)),
                                    ("DeepSpeed again", ranks.run(2, hops.in_deepspeed, family, 3, back, None, steps))):
                    self.check_losses(f"{family}, from stage {stage}: in {name}", stayed, moved)

    def in_other(self, script, family, source, steps, **more):
        """The losses of the steps, by another trainer's script that has packages of its own."""
        python = pathlib.Path(sys.prefix) / "trainers/bin/python"
        if not python.exists():
            self.skipTest("no environment with other trainers")
        config = hops.make_model(family, 5).config
        job = {"family": family, "source": str(source), "steps": steps, "batch": hops.BATCH,
               "batches": [hops.batch(step).tolist() for step in range(*steps)],
               "layers": config.num_hidden_layers, "hidden": config.hidden_size, "heads": config.num_attention_heads,
               "kv_heads": config.num_key_value_heads, "inner": config.intermediate_size, "epsilon": config.rms_norm_eps,
               "vocabulary": hops.VOCABULARY, "length": hops.LENGTH, "theta": config.rope_parameters["rope_theta"],
               "experts": 4, "topk": 2, "betas": (0.9, 0.95), "rate": hops.RATE, "decay": 0.1, "adam_epsilon": 1e-8,
               "bf16": False, "output": None, **more}
        # Not the environment that DeepSpeed has set up for itself.
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        done = subprocess.run([python, pathlib.Path(__file__).with_name(script), json.dumps(job)],
                              env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3000, check=False)
        if done.returncode != 0:
            raise AssertionError(done.stderr[-3000:])
        return json.loads(done.stdout.splitlines()[-1])

    def test_sums_of_megatron(self):
        """integrity.json as Megatron-Core writes it is understood, and Megatron-Core finds ours right."""
        python = pathlib.Path(sys.prefix) / "trainers/bin/python"
        if not python.exists():
            self.skipTest("no environment with other trainers")
        scratch = self.scratch()
        data = pathlib.Path(__file__).resolve().parents[2] / "data/megatron/dist_full_tp2/ckpt"
        shutil.copytree(data, scratch / "ckpt")

        def megatron(what, folder):
            code = f"from megatron.core.dist_checkpointing.validation import {what} as run; import sys; run(sys.argv[1])"
            done = subprocess.run([python, "-W", "ignore", "-c", code, folder / "iter_0000002"], capture_output=True,
                                  text=True, timeout=3000, check=False)
            return done.stderr if done.returncode != 0 else ""

        self.assertEqual(megatron("save_integrity_manifest", scratch / "ckpt"), "")
        self.ucp.run("ucp-load", scratch / "ckpt", scratch / "made", "--format", "megatron", "--target", "tp=1")
        self.ucp.run("ucp-load", "--check", scratch / "ckpt", scratch / "made")
        self.assertEqual(megatron("verify_integrity_manifest", scratch / "made"), "")
        (scratch / "made/iter_0000002/metadata.json").write_text("{}")
        self.assertIn("metadata.json: hash mismatch", megatron("verify_integrity_manifest", scratch / "made"))

    def in_megatron(self, family, source, steps):
        """The losses of the steps, by Megatron-Core on two ranks."""
        return self.in_other("megatron_hop.py", family, source, steps, ranks=2, tp=2 if family == "llama" else 1,
                             ep=1 if family == "llama" else 2)

    def test_into_megatron_lm(self):
        """Megatron-LM itself resumes weights, optimizer, iteration and consumed samples."""
        sizes = ("--map-sizes", "heads=4,kv_heads=2")
        rates = f"lr={hops.RATE},min_lr={hops.RATE / 20}"
        tp2, pp2, ep2, dp2 = ({"tp": 1, "pp": 1, "ep": 1, "dp": 1} | one
                              for one in ({"tp": 2}, {"pp": 2}, {"ep": 2, "dp": 2}, {"dp": 2}))
        for family, stage, layout, optimizer in (
                ("llama", 2, tp2, "none"), ("llama", None, dp2, "fully_reshardable"),
                ("llama", 3, pp2, "fully_reshardable"), ("mixtral", 1, ep2, "fully_reshardable")):
            with self.subTest(family, stage=stage, layout=layout, optimizer=optimizer):
                scratch = self.scratch()
                first, made = scratch / "first", scratch / "made"
                target = ",".join(f"{key}={value}" for key, value in layout.items())
                target += f",optimizer={optimizer},{rates}"
                steps = (STEPS, 2 * STEPS)
                if stage is None:  # DCP folders have no place for the number of samples
                    ranks.run(2, hops.in_fsdp2, family, None, first, (0, STEPS))
                    stayed = ranks.run(2, hops.in_fsdp2, family, first, None, steps)
                    target += f",samples={STEPS * hops.BATCH}"
                else:
                    ranks.run(2, hops.in_deepspeed, family, stage, None, first, (0, STEPS))
                    stayed = ranks.run(2, hops.in_deepspeed, family, stage, first, None, steps)
                self.ucp.run("ucp-load", first, made, "--format", "megatron", "--target", target, "--map",
                             f"{family}:megatron", *sizes)
                moved = self.in_other("megatron_lm_hop.py", family, made, steps, ranks=2, min_rate=hops.RATE / 20,
                                      layout=layout | {"optimizer": optimizer})
                begin = "FSDP2" if stage is None else f"stage {stage}"
                self.check_losses(f"{family}, from {begin}: in Megatron-LM with {target}", stayed, moved)

    def test_into_megatron_lm_in_bfloat16(self):
        """Megatron-LM loads what DeepSpeed saved, and saves it again. Losses are rounded differently."""
        scratch, steps = self.scratch(), (STEPS, 2 * STEPS)
        first = scratch / "first"
        map_to = ("--map-sizes", "heads=4,kv_heads=2", "--map")
        layout = {"tp": 2, "pp": 1, "ep": 1, "dp": 1}
        ranks.run(2, hops.in_deepspeed, "llama", 2, None, first, (0, STEPS), hops.load_into_engine, True)
        stayed = ranks.run(2, hops.in_deepspeed, "llama", 2, first, None, steps, hops.load_into_engine, True)
        for optimizer in ("none", "fully_reshardable"):
            with self.subTest(optimizer):
                self.ucp.run("ucp-load", first, scratch / f"made-{optimizer}", "--format", "megatron", "--target",
                             f"tp=2,optimizer={optimizer},lr={hops.RATE},min_lr={hops.RATE / 20}", *map_to, "llama:megatron")
                moved = self.in_other("megatron_lm_hop.py", "llama", scratch / f"made-{optimizer}", steps, ranks=2, bf16=True,
                                      min_rate=hops.RATE / 20, output=str(scratch / f"again-{optimizer}"),
                                      layout=layout | {"optimizer": optimizer})
                self.ucp.run("ucp-load", "--check", scratch / f"again-{optimizer}", first, *map_to, "llama:hf")
                self.check_losses(f"llama, bfloat16: in Megatron-LM with optimizer={optimizer}", stayed, moved, 0.01)

    def test_weights_begin_a_run_of_megatron_lm(self):
        """Weights of a model hub have no iteration. Megatron-LM loads them without --finetune."""
        scratch, steps = self.scratch(), (0, STEPS)
        hops.make_model("llama", 5).save_pretrained(scratch / "hub")
        self.ucp.run("ucp-load", scratch / "hub", scratch / "made", "--format", "megatron", "--target", "tp=2", "--map", "auto")
        expected = ranks.run(2, hops.in_fsdp2, "llama", None, None, steps)
        begun = self.in_other("megatron_lm_hop.py", "llama", scratch / "made", steps, ranks=2, min_rate=hops.RATE / 20,
                              layout={"tp": 2, "pp": 1, "ep": 1, "dp": 1, "optimizer": "none"})
        self.check_losses("llama: a run of Megatron-LM that begins with weights of a model hub", expected, begun)

    def by_way_of_torchtitan(self, first, stayed, *, fused):
        """`first` continues in torchtitan, and the torchtitan checkpoint in DeepSpeed."""
        sizes = ("--map-sizes", "heads=4,kv_heads=2")
        to_titan = ("--map", "llama:torchtitan", *(("--map", "torchtitan_qkv:saved") if fused else ()), *sizes)
        to_hf = ("--map", "llama:hf", *sizes)
        scratch = self.scratch()
        there, made, back = (scratch / name for name in ("there", "made", "back"))
        there.mkdir()
        self.ucp.run("ucp-load", first, there / f"step-{STEPS}", "--format", "dcp", "--flavour", "torchtitan",
                     "--target", "dp_shard=3", *to_titan)
        moved = self.in_other("titan_hop.py", "llama", there, (STEPS, 2 * STEPS), ranks=3, fused=fused, output=str(made))
        self.ucp.run("ucp-load", made / f"step-{2 * STEPS}", back, "--format", "deepspeed", "--target", "zero=2,dp=2",
                     *to_hf)
        self.ucp.run("ucp-load", "--check", made / f"step-{2 * STEPS}", back, *to_hf)
        moved += ranks.run(2, hops.in_deepspeed, "llama", 2, back, None, (2 * STEPS, 3 * STEPS))
        self.check_losses(f"llama: in torchtitan{' with fused projections' if fused else ''} and back", stayed, moved)

    def test_by_way_of_torchtitan(self):
        """Its optimizer has the states of query, key and value apart, or as one."""
        first = self.scratch() / "first"
        ranks.run(2, hops.in_deepspeed, "llama", 3, None, first, (0, STEPS))
        stayed = ranks.run(2, hops.in_deepspeed, "llama", 3, first, None, (STEPS, 3 * STEPS))
        for fused in (False, True):
            with self.subTest(fused=fused):
                self.by_way_of_torchtitan(first, stayed, fused=fused)

    def test_out_of_a_save_without_collectives(self):
        """Files with an index for each rank load only on as many ranks as saved them; a conversion of them loads on any
        number."""
        scratch = self.scratch()
        first, made = scratch / "first", scratch / "made"
        ranks.run(3, hops.in_fsdp2, "llama", None, first, (0, STEPS), False)
        self.assertEqual(sorted(path.name for path in first.glob("*.metadata")), [f"__{r}.metadata" for r in range(3)])
        self.ucp.run("ucp-load", first, made, "--target", "dp_shard=2", "--format", "dcp")
        self.ucp.run("ucp-load", "--check", first, made)
        steps = (STEPS, 2 * STEPS)
        stayed = ranks.run(3, hops.in_fsdp2, "llama", first, None, steps)
        moved = ranks.run(2, hops.in_fsdp2, "llama", made, None, steps)
        self.check_losses("llama: from an index for each rank", stayed, moved)

    def test_there_and_back_is_the_same_checkpoint(self):
        scratch = self.scratch()
        ranks.run(2, hops.in_deepspeed, "llama", 2, None, scratch / "first", (0, STEPS))
        self.ucp.run("ucp-load", scratch / "first", scratch / "dcp", "--format", "dcp", "--target", "dp_shard=3")
        self.ucp.run("ucp-load", scratch / "dcp", scratch / "back", "--format", "deepspeed", "--target", "zero=3,dp=2")
        self.check_but_for_samples(scratch / "first", scratch / "back")


if __name__ == "__main__":
    Hops.ucp = commands.from_arguments()
    unittest.main(verbosity=2)
