# SPDX-License-Identifier: Apache-2.0
"""Continues a run of hops.py in Megatron-LM: its arguments, load_checkpoint, optimizer and schedule, on the CPU.

    megatron_lm_hop.py '{"family": "llama", "layout": {"tp": 2, ...}, "source": ..., "steps": [4, 6], ...}'

Prints the losses as JSON in its last line. With "output", the run first saves what it has loaded there. Runs in the
environment of scripts/peers that has megatron-core.
"""

import pathlib
import sys

import hop_ranks

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models"))

import in_megatron
import torch
from megatron.core import mpu


def words(job):
    """Arguments beyond those of in_megatron.py."""
    return [*f"""--norm-epsilon {job["epsilon"]} --lr {job["rate"]} --min-lr {job["min_rate"]} --lr-decay-style constant
        --lr-warmup-iters 0 --weight-decay {job["decay"]} --adam-beta2 {job["betas"][1]} --clip-grad 0
        --rotary-base {int(job["theta"])} --override-opt_param-scheduler""".split(),
            *(["--moe-ffn-hidden-size", str(job["inner"])] if job["family"] == "mixtral" else [])]


def share_of_batch(job, step):
    """This data-parallel rank's samples, one by one: tokens, and those that follow them."""
    tokens = torch.tensor(job["batches"][step - job["steps"][0]])
    for one in tokens[mpu.get_data_parallel_rank()::mpu.get_data_parallel_world_size()]:
        yield one[None, :-1], one[None, 1:]


def train(job):
    model = {"layers": job["layers"], "hidden": job["hidden"], "inner": job["inner"], "heads": job["heads"],
             "kv_heads": job["kv_heads"], "vocabulary": job["vocabulary"], "norm": "RMSNorm", "seed": 105, "tied": False,
             "gated": True, "bias": False, "bf16": job["bf16"], "samples": job["batch"], "length": job["length"] - 1,
             "experts": job["experts"] if job["family"] == "mixtral" else 0, "more": words(job)}
    run = in_megatron.build(model, job["layout"], job["source"])
    args, _, _, scheduler = run
    first, samples = job["steps"][0], job["steps"][0] * job["batch"]
    found = (args.iteration, args.consumed_train_samples, scheduler.num_steps)
    if found != (first, samples, samples):
        raise AssertionError(f"iteration, samples, steps of the schedule: {found}, expected {(first, samples, samples)}")
    if job["output"]:
        in_megatron.save(run, job["output"], True)
    return [in_megatron.train_step(run, model, step, share_of_batch(job, step)) for step in range(*job["steps"])]


if __name__ == "__main__":
    hop_ranks.main(train)
