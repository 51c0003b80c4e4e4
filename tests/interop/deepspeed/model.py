# SPDX-License-Identifier: Apache-2.0
"""The model of the interop tests: a small language model of odd sizes, and the engine of a case.

A case is a dict; keys that it omits have the value below. `layers` blocks of width `width` read
`vocab` tokens; the names of the other keys are those of DeepSpeed's configuration where it has one.
"""

import os
import zlib

import deepspeed
import torch
import torch.nn.functional as functional
from torch import nn

import entries
from optimizers import OPTIMIZERS, OWN_RATE

CASE = {
    "zero": 1,               # stage, 0 to 3
    "dtype": "fp32",         # of the weights that are computed with: fp32, bf16 or fp16
    "grad_accum": None,      # "fp32" with bf16 and stage 1 makes DeepSpeed use its BF16_Optimizer
    "optimizer": "adamw",    # a name in optimizers.py
    "groups": 2,             # parameter groups, 1 to 3
    "configured": False,     # the optimizer is AdamW, made by DeepSpeed from the configuration; one group
    "frozen": False,         # some parameters are not trained
    "frozen_experts": False,  # nor is the last expert of each rank
    "left_out": False,       # nor is the embedding, and checkpoints leave all of these out: a base model has them
    "tied": False,           # the output weights are those of the embedding
    "buffers": True,
    "entries": False,        # state dicts hold more than parameters and buffers in row-major order: entries.py
    "frozen_later": False,   # a parameter is frozen after the optimizer was made
    "round_robin": False,    # round_robin_gradients of stages 1 and 2
    "elastic": False,        # elastic_checkpoint of stages 1 and 2
    "sub_group": None,       # sub_group_size of stage 3
    "experts": 0, "ep": 1,   # MoE: experts of a layer, and ranks that divide them
    "pp": 1, "pipe": False,  # pipeline stages; pipe makes it a PipelineModule even with one
    "tp": 1,                 # AutoTP
    "viewed": False,         # AutoTP cuts the attention's weight along an inner dimension, as it does fused experts
    "sp": 1,                 # Ulysses: ranks that divide a sequence
    "config": {},            # more of DeepSpeed's configuration; with an optimizer in it, that one is used
    "accelerate": False,     # Accelerate's plugin makes the engine
    "muon": False,           # matrices inside the blocks are marked for DeepSpeed's Muon
    "width": 24, "layers": 2, "vocab": 61, "batch": 24, "seed": 7,
}
HEADS = 4
INPUTS = 8  # tokens of a sample
# AutoTP's cut of a Block.
TENSOR_PARALLEL = [
    {"patterns": [r".*\.attend\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
    {"patterns": [r".*\.attended\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.widen\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.narrow\.weight$"], "partition_type": "row"},
    {"patterns": [r".*"], "partition_type": "skip"},
]


def tensor_parallel(case):
    """The same cuts with the attention seen as [3, width, width], one matrix for each of query, key and value."""
    if not case["viewed"]:
        return TENSOR_PARALLEL
    attend = TENSOR_PARALLEL[0] | {"shape": [3, -1, case["width"]], "partition_dim": 1}
    return [attend, *TENSOR_PARALLEL[1:]]


def complete(case):
    """The case with every key, rejecting unused keys."""
    unknown = set(case) - set(CASE)
    if unknown:
        raise ValueError(f"no such keys in a case: {sorted(unknown)}")
    whole = CASE | case
    whole["pipe"] = whole["pipe"] or whole["pp"] > 1
    return whole


def whole_attention(query, key, value):
    """Of [samples, tokens, heads, width]."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def attention(query, key, value):
    """With Ulysses a rank has some tokens of all heads, and gets all tokens of some heads for this."""
    from deepspeed.utils import groups
    if groups._get_sequence_parallel_world_size() == 1:
        return whole_attention(query, key, value)
    from deepspeed.sequence.layer import DistributedAttention
    return DistributedAttention(whole_attention, groups._get_sequence_parallel_group(), 2, 1)(query, key, value, 0)


class Block(nn.Module):
    """Attention over several heads, an MLP with a width that nothing divides, and experts if requested."""

    def __init__(self, case, index):
        super().__init__()
        width = case["width"]
        self.head_width = width // HEADS
        self.norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)
        if case["frozen"] and index == 0:
            self.attended.weight.requires_grad_(False)
        if case["frozen"] and index == case["layers"] - 1:
            self.widen.bias.requires_grad_(False)
        if case["buffers"]:
            self.register_buffer("scale", torch.full((3,), 1.0 + index / 4))
        if case["entries"]:
            entries.add_to(self, index)
        self.moe = None
        if case["experts"]:
            from deepspeed.moe.layer import MoE
            expert = nn.Sequential(nn.Linear(width, width + 3), nn.ReLU(), nn.Linear(width + 3, width))
            if case["entries"]:
                expert.append(entries.ExtraState(3))  # DeepSpeed saves tensors of experts only
            room = float(case["experts"])  # for every token, wherever it goes; older releases stumble over more
            self.moe = MoE(width, expert=expert, num_experts=case["experts"], ep_size=case["ep"], k=1,
                           capacity_factor=room, eval_capacity_factor=room, min_capacity=8, use_rts=False)
            if case["frozen_experts"]:
                last = self.moe.deepspeed_moe.experts.deepspeed_experts[-1].requires_grad_(False)
                for weight in last.parameters():  # they were equal on all ranks
                    weight.add_(0.1 * (1 + torch.distributed.get_rank() % case["ep"]))

    def forward(self, x):
        # A tensor-parallel rank holds some of the heads: their number follows from the weights.
        shape = (*x.shape[:-1], -1, self.head_width)
        query, key, value = (part.reshape(shape) for part in self.attend(self.norm(x)).chunk(3, -1))
        x = x + self.attended(attention(query, key, value).flatten(2))
        wide = functional.gelu(self.widen(x))
        if hasattr(self, "scale"):
            wide = wide * self.scale[0].to(wide.dtype)
        x = x + self.narrow(wide)
        return x if self.moe is None else x + self.moe(x)[0]


class Embed(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.emb = nn.Embedding(case["vocab"], case["width"])
        self.emb.weight.requires_grad_(not case["left_out"])

    def forward(self, x):
        return self.emb(x)


class Score(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.head = nn.Linear(case["width"], case["vocab"], bias=False)

    def forward(self, x):
        return self.head(x)


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.embed = Embed(case)
        self.blocks = nn.ModuleList(Block(case, index) for index in range(case["layers"]))
        self.score = Score(case)
        if case["tied"]:
            self.score.head.weight = self.embed.emb.weight
        # One module under two names of the same parent: DeepSpeed sees the first of them only.
        self.again = nn.ModuleList([nn.Linear(case["width"], case["width"])] * 2 if case["entries"] else [])

    def forward(self, x, y):
        x = self.embed(x)
        for block in [*self.blocks, *self.again]:
            x = block(x)
        return loss_of(self.score(x), y)


def loss_of(scores, y):
    return functional.cross_entropy(scores.float().flatten(0, 1), y.flatten())


def make_model(case):
    torch.manual_seed(case["seed"])
    model = make_pipeline(case) if case["pipe"] else Model(case)
    if case["left_out"]:
        load_base(model)
    return model


def load_base(model):
    """Frozen weights are the same in every run."""
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def make_pipeline(case):
    from deepspeed.pipe import LayerSpec, PipelineModule
    layers = [LayerSpec(Embed, case), *(LayerSpec(Block, case, i) for i in range(case["layers"])), LayerSpec(Score, case)]
    return PipelineModule(layers, num_stages=case["pp"], loss_fn=loss_of, partition_method="uniform", base_seed=case["seed"])


def make_groups(model, case):
    """The parameter groups that the optimizer gets: each with hyper-parameters of its own."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    members = [[], [], []]
    for name, weight in trained:
        which = 0 if case["groups"] == 1 or weight.dim() > 1 else 1
        if case["groups"] == 3 and "emb" in name:
            which = 2
        members[which].append(weight)
    hyper = [{"weight_decay": 0.1, "name": "matrices"}, {"weight_decay": 0.0, "lr": 2e-3, "name": "vectors"},
             {"weight_decay": 0.01, "lr": 5e-4, "name": "embedding"}]
    groups = [{"params": weights, **values} for weights, values in zip(members, hyper) if weights]
    if case["experts"]:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return groups


def merged(config, more):
    """`config` with the additions of `more` to it and to the dicts in it."""
    both = {key: merged(config[key], more[key]) for key in config.keys() & more.keys() if isinstance(more[key], dict)}
    return config | more | both


def configuration(case, universal):
    ranks = int(os.environ["WORLD_SIZE"])
    accumulated = 2 if case["pipe"] else 1
    zero = {"stage": case["zero"], "round_robin_gradients": case["round_robin"], "overlap_comm": False,
            "elastic_checkpoint": case["elastic"]}
    if case["zero"] == 3:
        zero["stage3_param_persistence_threshold"] = 10
        if case["sub_group"]:
            zero["sub_group_size"] = case["sub_group"]
    config = {
        "gradient_accumulation_steps": accumulated,
        "train_micro_batch_size_per_gpu": case["batch"] // (ranks // (case["pp"] * case["tp"] * case["sp"])) // accumulated,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 10}},
        "checkpoint": {"load_universal": universal},
    }
    if case["optimizer"] in OWN_RATE:
        del config["scheduler"]
    if case["sp"] > 1:
        config["sequence_parallel_size"] = case["sp"]
    if case["configured"]:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                                                           "weight_decay": 0.1, "torch_adam": True}}
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    elif case["dtype"] == "fp16":
        # The scale changes every other step: checkpoints have to keep it.
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if case["grad_accum"]:
        config["data_types"] = {"grad_accum_dtype": case["grad_accum"]}
    if case["tp"] > 1:
        config["tensor_parallel"] = {
            "autotp_size": case["tp"],
            "partition_config": {"use_default_specs": False, "layer_specs": tensor_parallel(case)},
        }
    return merged(config, case["config"])


def make_engine(case, universal=False):
    if case["dtype"] == "fp16":
        # DeepSpeed asks whether the processor has fp16 instructions; PyTorch computes without too.
        from deepspeed.accelerator import get_accelerator
        get_accelerator().is_fp16_supported = lambda: True
    model, config = make_model(case), configuration(case, universal)
    ranks_of = None  # ranks that divide work; DeepSpeed finds out but for sequences
    if case["sp"] > 1:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp as ranks_of
        ranks_of.initialize_sequence_parallel(case["sp"])
    if case["muon"]:
        for weight in model.parameters():
            weight.use_muon = weight.dim() > 1 and weight.shape[0] != case["vocab"]
    if "optimizer" in config:
        return deepspeed.initialize(model=model, model_parameters=make_groups(model, case), config=config)[0]
    optimizer = OPTIMIZERS[case["optimizer"]](make_groups(model, case))
    if case["accelerate"]:
        from accelerate import Accelerator, DeepSpeedPlugin
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        engine = accelerator.prepare(model, optimizer)[0]
        engine.accelerator = accelerator
        return engine
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=ranks_of)[0]
    if case["frozen_later"]:
        engine.module.blocks[0].norm.bias.requires_grad_(False)
    if hasattr(optimizer, "train"):
        optimizer.train()  # schedule-free ones keep two sets of weights; not before their parameters are DeepSpeed's
    return engine


def data_parallel(engine, case):
    """(rank, ranks) among those that read different samples."""
    if case["pipe"]:
        return engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    if case["tp"] > 1:
        from deepspeed.utils import groups
        return groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
    if case["sp"] > 1:  # ranks of a sequence have consecutive numbers
        return torch.distributed.get_rank() // case["sp"], torch.distributed.get_world_size() // case["sp"]
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def train_step(engine, case, step):
    """One step on the samples that belong to its number; the mean loss over all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, case["vocab"], (case["batch"], INPUTS), generator=generator)
    y = (5 * x + 2) % case["vocab"]  # can be learned, so that every piece of state matters
    rank, ranks = data_parallel(engine, case)
    x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    if case["sp"] > 1:
        part = torch.distributed.get_rank() % case["sp"]
        x, y = x.chunk(case["sp"], 1)[part], y.chunk(case["sp"], 1)[part]
    if case["pipe"]:
        return float(engine.train_batch(iter(list(zip(x.chunk(2), y.chunk(2))))))
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    total = loss.detach().double().clone()
    torch.distributed.all_reduce(total)
    return float(total / torch.distributed.get_world_size())
