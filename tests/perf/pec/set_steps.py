#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sets the number of optimizer steps in a DeepSpeed checkpoint: set_steps.py FOLDER STEPS"""

import pathlib
import sys

import torch

for path in pathlib.Path(sys.argv[1]).glob("*optim_states.pt"):
    whole = torch.load(path, weights_only=False, map_location="cpu")
    for state in whole["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = torch.full_like(torch.as_tensor(state["step"]), int(sys.argv[2]))
    torch.save(whole, path)
