# SPDX-License-Identifier: Apache-2.0
"""Makes checkpoints with Megatron's names with the standard library alone."""

import sys

import moe_checkpoint
from harness import SOURCE

sys.path.insert(0, str(SOURCE / "tests" / "cli" / "megatron"))

import legacy_test  # pylint: disable=wrong-import-position
import torch_dist_test  # pylint: disable=wrong-import-position


def native(folder, experts=False):
    """A native DeepSpeed checkpoint with Megatron's parameter names."""
    shapes = dict(torch_dist_test.names())
    if experts:
        shapes = {name: shape for name, shape in shapes.items() if "mlp.linear" not in name}
        for layer in range(torch_dist_test.LAYERS):
            shapes[f"decoder.layers.{layer}.mlp.router.weight"] = (2, 8)
            for expert in range(2):
                for name, shape in (("linear_fc1", (16, 8)), ("linear_fc2", (8, 8))):
                    shapes[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{name}.weight"] = shape
    model = moe_checkpoint.Model(dtype="bf16", extra=shapes, hidden=8, layers=0 if experts else 2,
                                 config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    moe_checkpoint.write(folder, model, 7)
    return folder


def legacy(folder):
    """Files of one rank."""
    legacy_test.Run().save(folder)
    return folder
