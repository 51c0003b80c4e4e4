# SPDX-License-Identifier: Apache-2.0
"""The optimizers that the interop tests train with, by the name that a case gives them."""

import importlib

import torch


def _made_by(package, name, *, own_rate=False, **options):
    """Makes `package.name(groups, **options)`; with own_rate the groups' learning rates are left to it."""
    def make(groups):
        if own_rate:
            groups = [{key: value for key, value in group.items() if key != "lr"} for group in groups]
        return getattr(importlib.import_module(package), name)(groups, **options)
    return make


class Lion(torch.optim.Optimizer):
    """The sign of a mixed momentum; that of DeepSpeed and of bitsandbytes hold the same state."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in (w for w in group["params"] if w.grad is not None):
                momentum = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                old, new = group["betas"]
                weight.add_(torch.sign(momentum * old + weight.grad * (1 - old)), alpha=-group["lr"])
                momentum.mul_(new).add_(weight.grad, alpha=1 - new)


TRANSFORMERS, BNB, FREE = "transformers.optimization", "bitsandbytes.optim", "schedulefree"
OPTIMIZERS = {
    "adamw": _made_by("torch.optim", "AdamW", lr=1e-3, betas=(0.9, 0.95)),
    "amsgrad": _made_by("torch.optim", "AdamW", lr=1e-3, amsgrad=True),
    "sgd": _made_by("torch.optim", "SGD", lr=1e-2, momentum=0.9),
    "sgd_plain": _made_by("torch.optim", "SGD", lr=1e-2),
    "adagrad": _made_by("torch.optim", "Adagrad", lr=1e-2),
    "nadam": _made_by("torch.optim", "NAdam", lr=1e-3),
    "radam": _made_by("torch.optim", "RAdam", lr=1e-3),
    "asgd": _made_by("torch.optim", "ASGD", lr=1e-2),
    "rprop": _made_by("torch.optim", "Rprop", lr=1e-3),
    "adamax": _made_by("torch.optim", "Adamax", lr=1e-3),
    "rmsprop": _made_by("torch.optim", "RMSprop", lr=1e-3, momentum=0.9, centered=True),
    "torch_adafactor": _made_by("torch.optim", "Adafactor", lr=1e-2),
    "lion": lambda groups: Lion(groups, lr=1e-4),
    "adafactor": _made_by(TRANSFORMERS, "Adafactor", lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9),
    "adafactor_relative": _made_by(TRANSFORMERS, "Adafactor", own_rate=True, relative_step=True, scale_parameter=True,
                                   warmup_init=True),
    "prodigy": _made_by("prodigyopt", "Prodigy", own_rate=True, lr=1.0),
    "prodigy_slice": _made_by("prodigyopt", "Prodigy", own_rate=True, lr=1.0, slice_p=11),
    "schedule_free": _made_by(FREE, "AdamWScheduleFree", lr=1e-2, warmup_steps=3),
    "schedule_free_sgd": _made_by(FREE, "SGDScheduleFree", lr=1e-2),
    "bnb_adamw": _made_by(BNB, "AdamW", lr=1e-3),
    "bnb_adamw8": _made_by(BNB, "AdamW8bit", lr=1e-3, min_8bit_size=0),
    "bnb_lion": _made_by(BNB, "Lion", lr=1e-4),
    "bnb_lion8": _made_by(BNB, "Lion8bit", lr=1e-4, min_8bit_size=0),
    "bnb_ademamix": _made_by(BNB, "AdEMAMix", lr=1e-3),
    "bnb_lamb": _made_by(BNB, "LAMB", lr=1e-3),
}
# These choose their rates themselves, so no scheduler sets them.
OWN_RATE = {"adafactor_relative", "prodigy", "prodigy_slice", "schedule_free", "schedule_free_sgd"}
