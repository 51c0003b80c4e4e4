# SPDX-License-Identifier: Apache-2.0
"""Optimizers and switches of DeepSpeed beyond plain Adam, and the outcome for their checkpoints.

A variant is trained at every stage that it names and converted to other stages and numbers of ranks.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Works:
    """Every tensor is there bit for bit, and the losses continue as they did; with a reason why they
    cannot, for any run with a changed layout, only the first of them."""
    drift: str = ""


@dataclasses.dataclass(frozen=True)
class Refused:
    """The conversion ends with exit code 9 and a message of these words."""
    words: tuple


@dataclasses.dataclass(frozen=True)
class Cannot:
    """DeepSpeed itself trains, saves or resumes no such run; its message has these words."""
    words: tuple


@dataclasses.dataclass(frozen=True)
class Variant:
    title: str
    case: dict                 # of model.py, without the stage
    outcome: object = Works()
    stages: tuple = (1, 2, 3)
    ranks: int = 2
    targets: tuple = ()        # (stage, ranks) instead of the usual ones
    sample: bool = False       # tried in every run of the tests, from its first stage to one layout


@dataclasses.dataclass(frozen=True)
class Wrong:
    """None of these: never expected."""
    words: tuple


def refused(*words):
    return Refused(words)


def cannot(*words):
    return Cannot(words)


def named(kind, **parameters):
    """The optimizer that DeepSpeed makes from its configuration."""
    return {"config": {"optimizer": {"type": kind, "params": {"lr": 1e-3} | parameters}}}


def zero(optimizer=None, **keys):
    """Keys of zero_optimization, in addition to a DeepSpeed optimizer."""
    return {"config": (optimizer or {"config": {}})["config"] | {"zero_optimization": keys}}


MUON = named("Muon", lr=1e-2, momentum=0.95)
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
BY_PARTITION = Works("it scales an update by the mean square of a rank's partition")
BY_SUB_GROUP = Works("at stage 3 DeepSpeed steps once for every sub-group, which this optimizer counts")
OTHER_WEIGHTS = Works("DeepSpeed weighs the gradients of a sequence's ranks otherwise at stage 3")
EIGHT_BIT = refused("qmap1", "bitsandbytes")
NO_KERNEL = cannot("had not been implemented on CPU backend")
GONE = cannot("is not a supported DeepSpeed Optimizer")  # 0.19 has left them out
VARIANTS = {
    "nadam": Variant("torch NAdam", {"optimizer": "nadam"}),
    "radam": Variant("torch RAdam", {"optimizer": "radam"}),
    "asgd": Variant("torch ASGD", {"optimizer": "asgd"}),
    "rprop": Variant("torch Rprop", {"optimizer": "rprop"}),
    "adamax": Variant("torch Adamax", {"optimizer": "adamax"}),
    "rmsprop": Variant("torch RMSprop, centred, with momentum", {"optimizer": "rmsprop"}),
    "sgd_plain": Variant("torch SGD without momentum", {"optimizer": "sgd_plain"}),
    "torch_adafactor": Variant("torch Adafactor", {"optimizer": "torch_adafactor"}, BY_PARTITION),
    "lion": Variant("Lion", {"optimizer": "lion"}),
    "adafactor": Variant("Adafactor of Transformers, given rate", {"optimizer": "adafactor"}, BY_PARTITION, sample=True),
    "adafactor_relative": Variant("Adafactor of Transformers, relative rate", {"optimizer": "adafactor_relative"}, BY_PARTITION),
    "schedule_free": Variant("schedule-free AdamW", {"optimizer": "schedule_free"}, BY_SUB_GROUP, sample=True),
    "schedule_free_sgd": Variant("schedule-free SGD", {"optimizer": "schedule_free_sgd"}, BY_SUB_GROUP),
    "prodigy": Variant("Prodigy", {"optimizer": "prodigy"}, refused("option \"d\"", "Prodigy")),
    "prodigy_slice": Variant("Prodigy with slice_p", {"optimizer": "prodigy_slice"}, refused("\"s\"", "Prodigy"), sample=True),
    "bnb_adamw": Variant("bitsandbytes AdamW, 32 bits", {"optimizer": "bnb_adamw"}),
    "bnb_adamw8": Variant("bitsandbytes AdamW, 8 bits", {"optimizer": "bnb_adamw8"}, EIGHT_BIT, sample=True),
    "bnb_lion": Variant("bitsandbytes Lion, 32 bits", {"optimizer": "bnb_lion"}),
    "bnb_lion8": Variant("bitsandbytes Lion, 8 bits", {"optimizer": "bnb_lion8"}, EIGHT_BIT),
    "bnb_ademamix": Variant("bitsandbytes AdEMAMix", {"optimizer": "bnb_ademamix"}, refused("state1", "[2, "), sample=True),
    "bnb_lamb": Variant("bitsandbytes LAMB", {"optimizer": "bnb_lamb"}, refused("unorm_vec", "bitsandbytes")),
    "muon": Variant("DeepSpeed Muon", {"muon": True} | zero(MUON, reduce_scatter=False),
                    refused("momentum_buffer", "Muon"), stages=(1, 2)),
    "muon_3": Variant("DeepSpeed Muon, to stage 3", {"muon": True} | zero(MUON, reduce_scatter=False),
                      stages=(3,), targets=((3, 3), (3, 1))),
    "muon_3_others": Variant("DeepSpeed Muon, to stages 1 and 2", {"muon": True} | zero(MUON, reduce_scatter=False),
                             refused("momentum_buffer", "whole parameters"), stages=(3,), targets=((2, 3), (1, 1))),
    "muon_memory": Variant("DeepSpeed Muon, its momentum kept in memory (DeepSpeed does not load it)", {"muon": True} | zero(
        MUON, reduce_scatter=False, save_muon_momentum_buffer_in_memory=True), cannot("losses"), stages=(3,)),
    "cpu_adam": Variant("DeepSpeed AdamW, offloaded", zero(named("AdamW"), **ON_HOST)),
    "cpu_adagrad": Variant("DeepSpeed Adagrad, offloaded", {"groups": 1} | zero(named("Adagrad"), **ON_HOST)),
    "cpu_lion": Variant("DeepSpeed Lion, offloaded", zero(named("Lion", lr=1e-4), **ON_HOST)),
    "ds_lion": Variant("DeepSpeed Lion", named("Lion"), NO_KERNEL),
    "ds_lamb": Variant("DeepSpeed LAMB", named("Lamb"), NO_KERNEL),
    "onebit_adam": Variant("1-bit Adam", named("OneBitAdam", freeze_step=2), GONE, stages=(0, 1)),
    "zeroone_adam": Variant("0/1 Adam", named("ZeroOneAdam"), GONE, stages=(0, 1)),
    "onebit_lamb": Variant("1-bit LAMB", named("OneBitLamb", freeze_step=2), GONE, stages=(0, 1)),
    "hpz": Variant("ZeRO++ hpZ", zero(zero_hpz_partition_size=2), stages=(3,), ranks=4, sample=True),
    "qwz": Variant("ZeRO++ qwZ", zero(zero_quantized_weights=True), cannot(), stages=(3,)),
    "qgz": Variant("ZeRO++ qgZ", zero(zero_quantized_gradients=True), cannot(), stages=(3,)),
    "mics": Variant("MiCS", zero(mics_shard_size=2), cannot(), stages=(3,), ranks=4),
    "frozen_experts": Variant("frozen experts, to stages 1 and 2",
                              {"experts": 4, "ep": 2, "frozen": True, "frozen_experts": True}, stages=(1,),
                              targets=((2, 4), (1, 4)), sample=True),
    # DeepSpeed gives every rank the frozen experts of the first one.
    "frozen_experts_2": Variant("frozen experts at stage 2", {"experts": 4, "ep": 2, "frozen_experts": True},
                                cannot("frozen"), stages=(2,), targets=((2, 4), (1, 4))),
    "accelerate": Variant("Accelerate's DeepSpeed plugin", {"accelerate": True}, sample=True),
    "ulysses": Variant("Ulysses, two ranks for a sequence, at stages 1 and 2", {"sp": 2}, stages=(1, 2), ranks=4,
                       targets=((2, 3), (1, 1))),
    "ulysses_3": Variant("Ulysses at stage 3", {"sp": 2}, stages=(3,), ranks=4, targets=((3, 3), (3, 1))),
    "ulysses_others": Variant("Ulysses, to and from stage 3", {"sp": 2}, OTHER_WEIGHTS, stages=(2, 3), ranks=4,
                              targets=((3, 1), (2, 1))),
}
