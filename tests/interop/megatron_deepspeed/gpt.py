# SPDX-License-Identifier: Apache-2.0
"""GPTModelPipe of Megatron-DeepSpeed and BLOOM's, in small: the same layers, parameter names, tied embedding, cuts and
universal_checkpoint_info, on DeepSpeed's PipelineModule.

A case is a dict; keys that it omits have the value below.
"""

import argparse
import enum
import math

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import parallel
from parallel import ColumnParallelLinear, LayerNorm, RowParallelLinear, VocabParallelEmbedding

CASE = {
    "tp": 1, "pp": 1, "dp": 1,
    "bloom": False,       # ALiBi and a layer norm behind the embedding, in place of learned positions
    "swiglu": False,
    "tied": True,         # the output layer has the weights of the embedding
    "dtype": "fp32",      # bf16 makes DeepSpeed use its BF16_Optimizer
    "version": 0.2,       # of universal_checkpoint_info; None: it has none, like BLOOM's
    "average": False,     # layer norms differ between the ranks, and universal_checkpoint_info averages the unsplit parameters
    "vocab": 512,         # padded to a multiple of 128 times the tensor-parallel ranks, as Megatron's default is
    "masked": True,       # padding of the vocabulary has no share in the loss; Megatron gives it one
    "partition": "type:transformer",
    "width": 16, "heads": 4, "layers": 4, "batch": 16, "seed": 7,
}
TOKENS = 8  # of a sample
MICRO_BATCHES = 2
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PositionEmbeddingType(enum.Enum):
    """An argument of Megatron's with a class of its own."""

    LEARNED = 1
    ALIBI = 2


def complete(case):
    """The case with every key, rejecting unused keys."""
    unknown = set(case) - set(CASE)
    if unknown:
        raise ValueError(f"no such keys in a case: {sorted(unknown)}")
    return CASE | case


def ranks_of(case):
    return case["tp"] * case["pp"] * case["dp"]


def padded_rows(case):
    multiple = 128 * case["tp"]
    return -(-case["vocab"] // multiple) * multiple


class Embedding(nn.Module):
    """Of the first layer and, by its weights only, of the last."""

    def __init__(self, case):
        super().__init__()
        dtype, seed = DTYPE[case["dtype"]], 100 * case["seed"]
        self.word_embeddings = VocabParallelEmbedding(padded_rows(case), case["width"], seed, dtype, case["bloom"])
        if not case["bloom"]:
            self.position_embeddings = nn.Embedding(TOKENS, case["width"])
            self.position_embeddings.weight = parallel.parameter(
                parallel.drawn((TOKENS, case["width"]), seed + 9), parallel.REPLICATED, dtype)

    @property
    def word_embeddings_weight(self):
        """The weights that DeepSpeed keeps equal over the stages."""
        return self.word_embeddings.weight

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        if hasattr(self, "position_embeddings"):
            x = x + self.position_embeddings(torch.arange(tokens.shape[1]))
        return x


class SelfAttention(nn.Module):
    def __init__(self, case, seed):
        super().__init__()
        width, dtype = case["width"], DTYPE[case["dtype"]]
        self.head_width, self.heads, self.alibi = width // case["heads"], case["heads"], case["bloom"]
        self.query_key_value = ColumnParallelLinear(width, 3 * width, seed, dtype)
        self.dense = RowParallelLinear(width, width, seed + 2, dtype)

    def bias(self, tokens, heads):
        """The mask, and with ALiBi the distances times the slopes of this rank's heads."""
        bias = torch.full((tokens, tokens), float("-inf")).triu(1)
        if not self.alibi:
            return bias
        slopes = 2.0 ** (-8.0 * (torch.arange(heads) + heads * parallel.Ranks.rank + 1) / self.heads)
        return bias + slopes[:, None, None] * torch.arange(tokens)

    def forward(self, x):
        # Query, key and value of a head are adjacent.
        mixed = self.query_key_value(x).unflatten(-1, (-1, 3 * self.head_width)).transpose(1, 2)
        query, key, value = mixed.chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_width)
        weights = (scores.float() + self.bias(x.shape[1], query.shape[1])).softmax(-1).to(x.dtype)
        return self.dense((weights @ value).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, case, seed):
        super().__init__()
        width, dtype, self.swiglu = case["width"], DTYPE[case["dtype"]], case["swiglu"]
        self.dense_h_to_4h = ColumnParallelLinear(
            width, (8 if self.swiglu else 4) * width, seed, dtype, parallel.HALVES if self.swiglu else parallel.ROWS)
        self.dense_4h_to_h = RowParallelLinear(4 * width, width, seed + 2, dtype)

    def forward(self, x):
        x = self.dense_h_to_4h(x)
        if self.swiglu:
            gate, up = x.chunk(2, -1)
            return self.dense_4h_to_h(nn.functional.silu(gate) * up)
        return self.dense_4h_to_h(nn.functional.gelu(x))


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, case, number):
        super().__init__()
        dtype, seed = DTYPE[case["dtype"]], 100 * case["seed"] + 20 * (number + 1)
        spread = 0.01 if case["average"] else 0.0
        self.input_layernorm = LayerNorm(case["width"], seed, dtype, spread)
        self.self_attention = SelfAttention(case, seed + 2)
        self.post_attention_layernorm = LayerNorm(case["width"], seed + 8, dtype, spread)
        self.mlp = MLP(case, seed + 10)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LMHeadPipe(nn.Module):
    """An output layer with weights of its own."""

    def __init__(self, case):
        super().__init__()
        self.lm_head = nn.Module()
        self.lm_head.weight = parallel.parameter(
            parallel.drawn((padded_rows(case), case["width"]), 100 * case["seed"] + 15), parallel.ROWS, DTYPE[case["dtype"]])

    def forward(self, x):
        return parallel.parallel_logits(x, self.lm_head.weight)


def unchanged(x):
    """Layers without state, which move dimensions or types in Megatron."""
    return x


def tied_logits(embedding, x):
    return parallel.parallel_logits(x, embedding.word_embeddings_weight)


def layers_of(case):
    """The layers in Megatron's numbers: the first transformer layer is 2, and BLOOM's is 3."""
    norm_seed = 100 * case["seed"] + 17
    if case["tied"]:
        first = TiedLayerSpec("embed", Embedding, case, tied_weight_attr="word_embeddings_weight")
        last = TiedLayerSpec("embed", Embedding, case, forward_fn=tied_logits, tied_weight_attr="word_embeddings_weight")
    else:
        first, last = LayerSpec(Embedding, case), LayerSpec(LMHeadPipe, case)
    blocks = [LayerSpec(ParallelTransformerLayerPipe, case, number) for number in range(case["layers"])]
    between = [unchanged] if case["bloom"] else []
    norm = LayerSpec(LayerNorm, case["width"], norm_seed, DTYPE[case["dtype"]])
    return [unchanged, first, *between, *blocks, *between, norm, last, *([unchanged] if case["dtype"] == "bf16" else [])]


def make_model(case):
    """Collective. The pipeline module of this rank."""
    topology = PipeModelDataParallelTopology(num_pp=case["pp"], num_mp=case["tp"], num_dp=case["dp"])
    parallel.Ranks.initialize(topology)
    rows = case["vocab"] if case["masked"] else None
    return PipelineModule(layers_of(case), topology=topology, partition_method=case["partition"],
                          loss_fn=lambda logits, labels: parallel.parallel_cross_entropy(logits, labels, rows))


def make_groups(model):
    """Megatron's groups: no weight decay for vectors."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [{"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.1, "wd_mult": 1.0, "lr_mult": 1.0},
              {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0, "wd_mult": 0.0, "lr_mult": 1.0}]
    return [group for group in groups if group["params"]]


def make_engine(case, universal=False):
    """Collective."""
    config = {
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": case["batch"] // case["dp"] // MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 10}},
        "checkpoint": {"load_universal": universal},
    }
    if case["dtype"] == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    model = make_model(case)
    optimizer = torch.optim.AdamW(make_groups(model), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_step(engine, case, step):
    """One step on the samples that belong to its number; the loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, min(case["vocab"], 61), (case["batch"], TOKENS), generator=generator)
    labels = (5 * tokens + 2) % 61  # can be learned, so that every piece of state matters
    rank, size = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    # The micro-batches of all layouts consist of the same samples.
    pairs = [(x.chunk(size)[rank], y.chunk(size)[rank])
             for x, y in zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES))]
    return float(engine.train_batch(iter(pairs)))


def arguments(case):
    """Those that Megatron puts into a checkpoint and compares when it loads one, and some of other types."""
    return argparse.Namespace(
        num_layers=case["layers"], hidden_size=case["width"], num_attention_heads=case["heads"],
        num_key_value_heads=case["heads"], add_position_embedding=not case["bloom"], max_position_embeddings=TOKENS,
        make_vocab_size_divisible_by=128, padded_vocab_size=padded_rows(case), tokenizer_type="GPT2BPETokenizer",
        tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"], data_parallel_size=case["dp"],
        world_size=ranks_of(case), rank=torch.distributed.get_rank(), params_dtype=DTYPE[case["dtype"]],
        adam_betas=(0.9, 0.95), curriculum_seqlen=None, swiglu=case["swiglu"],
        position_embedding_type=PositionEmbeddingType.ALIBI if case["bloom"] else PositionEmbeddingType.LEARNED)


def universal_checkpoint_info(case):
    """As Megatron-DeepSpeed's UniversalCheckpointInfo builds it; its expressions do not escape dots either."""
    vocabulary = [r"tied_modules.embed.word_embeddings.weight"] if case["tied"] else \
        [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"]
    info = {"universal_checkpoint_version": case["version"], "original_vocab_size": case["vocab"],
            "padded_vocab_size": padded_rows(case), "vocabulary_parameter_patterns": vocabulary,
            "pipeline_replicated_parameter_patterns": []}
    positions = r"tied_modules.embed.position_embeddings.weight"
    if case["tied"]:
        info["pipeline_replicated_parameter_patterns"] = vocabulary + ([] if case["bloom"] else [positions])
    if case["tp"] > 1:
        norms = [rf"\d+.{norm}.{kind}" for norm in ("input_layernorm", "post_attention_layernorm")
                 for kind in ("weight", "bias")]
        others = [r"\d+.weight", r"\d+.bias", r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias"]
        if case["bloom"]:
            others += [r"tied_modules.embed.word_embeddings.norm.weight", r"tied_modules.embed.word_embeddings.norm.bias"]
        elif case["tied"]:
            others.append(positions)
        else:
            others.append(r"\d+.position_embeddings.weight")
        # The ranks' layer norms are followed by the gradients of everything else that is not cut.
        info["parameter_to_average_patterns" if case["average"] else "tp_replicated_parameter_patterns"] = norms + others
        info["parameter_with_row_parallelism_patterns"] = [r"\d+.mlp.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"]
    info["parameter_with_2_sub_params_cat_dim_0"] = \
        [r"\d+.mlp.dense_h_to_4h.weight", r"\d+.mlp.dense_h_to_4h.bias"] if case["swiglu"] else []
    return info


def client_state(case, step):
    """The state that Megatron passes to save_checkpoint."""
    state = {"args": arguments(case), "checkpoint_version": 3.0, "iteration": step, "tokens": step * case["batch"] * TOKENS,
             "rng_state": [{"torch_rng_state": torch.get_rng_state()}]}
    if case["version"] is not None:
        state["universal_checkpoint_info"] = universal_checkpoint_info(case)
    return state


def rejected_arguments(saved, case):
    """The arguments that Megatron's check_checkpoint_args finds different, and so refuses the checkpoint."""
    compared = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "add_position_embedding",
                "max_position_embeddings", "make_vocab_size_divisible_by", "padded_vocab_size", "tokenizer_type",
                "tensor_model_parallel_size", "pipeline_model_parallel_size")
    mine = arguments(case)
    return [f"{name} is {getattr(saved, name)} in the checkpoint and {getattr(mine, name)} in the arguments"
            for name in compared if getattr(saved, name) != getattr(mine, name)]
