#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the files of a huge ZeRO-3 checkpoint without its bytes: real containers and pickles, payloads are holes.
The files of all ranks are links to those of the first.

    make_sparse.py OUT [--ranks 1024] [--tensors 1500] [--params 1e12]
"""
import argparse
import os
from collections import OrderedDict

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
SHARD = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1500)
    parser.add_argument("--params", type=float, default=1e12)
    args = parser.parse_args()
    folder = os.path.join(args.out, "global_step1")
    os.makedirs(folder)
    columns = 8191
    rows = int(args.params / args.tensors / columns)
    names = [f"layers.{i // 10}.part{i % 10}.weight" for i in range(args.tensors)]
    shapes = OrderedDict((name, torch.Size((rows, columns))) for name in names)
    share = -(-rows * columns // args.ranks)
    # One sub-group ends as soon as it has reached sub_group_size elements per rank.
    groups, size = [[]], 0
    for name in names:
        if size >= 10**9:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += share
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        flats = [torch.empty(share * len(group)) for group in groups]
        moments = [(torch.empty_like(flat), torch.empty_like(flat)) for flat in flats]
    model = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in names),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, shapes[name]) for name in group) for group in groups],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 1,
        "global_samples": 1024,
        "dp_world_size": args.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        "ds_version": "0.19.8",
    }
    torch.save(model, os.path.join(folder, MODEL.format(0)))
    state = {g: {"step": 1, "exp_avg": a, "exp_avg_sq": b} for g, (a, b) in enumerate(moments)}
    shard = {
        "zero_stage": 3,
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": args.ranks,
        "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 1e-4, "params": list(range(len(groups)))}]},
        "fp32_flat_groups": flats,
    }
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"optimizer_state_dict": shard, "ds_config": model["ds_config"], "ds_version": "0.19.8"},
                   os.path.join(folder, SHARD.format(0)))
    for rank in range(1, args.ranks):  # these files do not record their rank
        for name in (MODEL, SHARD):
            os.link(os.path.join(folder, name.format(0)), os.path.join(folder, name.format(rank)))
    with open(os.path.join(args.out, "latest"), "w", encoding="ascii") as file:
        file.write("global_step1")


main()
