# SPDX-License-Identifier: Apache-2.0
"""Saves and verifies small models of Megatron-Core with layers in other lists than decoder.layers alone: multi-token
prediction, an encoder, an encoder with a decoder, a vision tower.

    megatron_lists.py '{"do": "make" or "judge", "ranks": 2, "runs": [{"model": "mtp", "tp": 2, "form": "torch_dist", ...}]}'

A run names its model, its layout (tp, pp), the form of its files (torch_dist or torch) and its folder, that of the
iteration. `make` saves weights and optimizer after one step with random gradients; `judge` loads the folder into a model with
other weights. Both print, by run, a digest of every parameter and its optimizer state by rank, or the error of the load.
Gradients depend on the name of a parameter alone, so copies of it stay equal. Runs in the environment of scripts/peers that
has megatron-core.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import pathlib
import zlib

import megatron_hop  # first: it puts the CPU in place of CUDA
import hop_ranks
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (get_gpt_decoder_block_spec, get_gpt_layer_local_spec,
                                                      get_gpt_mtp_block_spec)
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

filesystem_async.get_write_results_queue.__defaults__ = ("fork",)  # its process need not import all of this again

VOCABULARY, LENGTH, LAYERS, HIDDEN, HEADS, GROUPS, CHANNELS = 40, 8, 2, 12, 4, 2, 3
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Tower(torch.nn.Module):
    """A language model next to a second list of layers, as models of images and text have it."""

    def __init__(self, config, language_model, tower):
        super().__init__()
        self.config, self.language_model, self.vision_model = config, language_model, tower

    def sharded_state_dict(self, prefix="", **_):
        return {**self.language_model.sharded_state_dict(prefix + "language_model."),
                **self.vision_model.sharded_state_dict(prefix + "vision_model.")}


def gpt(config, run, spec):
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    more = {}
    if config.mtp_num_layers:
        more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, VOCABULARY, LENGTH, first, last, parallel_output=True, position_embedding_type="rope",
                    share_embeddings_and_output_weights=run.get("tied", False), **more)


def make_model(run):
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 6,
               "moe_router_load_balancing_type": "none"} if run["model"] == "mtp_moe" else {}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=CHANNELS,
        ffn_hidden_size=10, normalization="RMSNorm", activation_func=torch.nn.functional.silu, gated_linear_unit=True,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, use_cpu_initialization=True, tensor_model_parallel_size=run.get("tp", 1),
        pipeline_model_parallel_size=run.get("pp", 1), pipeline_dtype=torch.float32,
        mtp_num_layers=2 if run["model"].startswith("mtp") else None, **experts)
    if run["model"] == "bert":
        config.normalization = "LayerNorm"
        model = BertModel(config, 0, bert_layer_local_spec, VOCABULARY, LENGTH, parallel_output=True)
    elif run["model"] == "t5":
        blocks = [TransformerBlockSubmodules([spec()] * LAYERS, layer_norm=WrappedTorchNorm)
                  for spec in (encoder_model_with_local_spec, decoder_model_with_local_spec)]
        config.normalization, config.num_query_groups = "LayerNorm", HEADS
        model = T5Model(config, config, *blocks, VOCABULARY, LENGTH, parallel_output=True)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False) if experts else get_gpt_layer_local_spec(
            normalization="RMSNorm")
        model = gpt(config, run, spec)
        if run["model"] == "tower":
            model = Tower(config, model, gpt(config, run, spec))
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=False), model)


def seeded(name, shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))


def name_of(name):
    """A copy of an embedding has the name of the first."""
    return name.removeprefix("module.")


def trained(run, seed):
    """A model and its optimizer after a step."""
    parallel_state.initialize_model_parallel(run.get("tp", 1), run.get("pp", 1))
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = make_model(run)
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, param in model.named_parameters():
            own = rank if getattr(param, "tensor_model_parallel", False) else 0
            param.copy_(seeded(name_of(name), param.shape, seed + own))
    job = {"rate": 1e-2, "decay": 0.1, "betas": (0.9, 0.95), "adam_epsilon": 1e-8}
    optimizer = megatron_hop.make_optimizer(job, model)
    for name, param in model.named_parameters():
        own = rank if getattr(param, "tensor_model_parallel", False) else 0
        param.main_grad.copy_(seeded(name_of(name), param.shape, seed + 1000 + own))
    optimizer.step()
    return model, optimizer


def digests(model, optimizer):
    """By rank and parameter: a digest of the weight and of its optimizer state."""
    found = {}
    for name, param in model.named_parameters():
        state = optimizer.optimizer.state[param]
        bits = b"".join(state[key].float().numpy().tobytes() for key in ("exp_avg", "exp_avg_sq"))
        found[name_of(name)] = hashlib.sha256(param.detach().numpy().tobytes() + bits).hexdigest()[:16]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


def arguments(run):
    """The arguments of a run that describe its model."""
    mtp = 2 if run["model"].startswith("mtp") else None
    return argparse.Namespace(
        tensor_model_parallel_size=run.get("tp", 1), pipeline_model_parallel_size=run.get("pp", 1), num_layers=LAYERS,
        num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True, kv_channels=CHANNELS,
        hidden_size=HIDDEN, num_experts=4 if run["model"] == "mtp_moe" else None, mtp_num_layers=mtp,
        mtp_use_repeated_layer=False, moe_layer_freq=[0, 1], make_vocab_size_divisible_by=1, vocab_size=VOCABULARY,
        untie_embeddings_and_output_weights=not run.get("tied", False), transformer_impl="local",
        params_dtype=torch.float32, optimizer="adam", use_distributed_optimizer=False)


def sharded(model, optimizer):
    weights = model.module.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=METADATA)}


def legacy_file(run):
    t, p = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    stage = f"_{p:03}" if run.get("pp", 1) > 1 else ""
    return pathlib.Path(run["folder"]) / f"mp_rank_{t:02}{stage}" / "model_optim_rng.pt"


def save(run, model, optimizer):
    common = {"args": arguments(run), "checkpoint_version": 3.0, "iteration": 1}
    folder = pathlib.Path(run["folder"])
    if run["form"] == "torch":
        path = legacy_file(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**common, "model": model.module.state_dict_for_save_checkpoint(),
                    "optimizer": optimizer.state_dict()}, path)
        return
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = sharded(model, optimizer)
    if run["model"] in ("mtp", "mtp_moe", "bert"):
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=METADATA)
    else:
        state.pop("optimizer")
    dist_checkpointing.save({**state.pop("model"), **state, **common, "content_metadata": {}}, str(folder))


def load(run, model, optimizer):
    if run["form"] == "torch":
        state = torch.load(legacy_file(run), weights_only=False)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return
    asked = sharded(model, optimizer)
    # A key that the model asks for and that is not there ends the load.
    state = dist_checkpointing.load({**asked.pop("model"), **asked}, run["folder"])
    optimizer.load_state_dict(state.pop("optimizer"))
    held = model.module.state_dict()
    model.module.load_state_dict({key: value for key, value in state.items() if key in held})


def one(do, run):
    model, optimizer = trained(run, 1 if do == "make" else 77)
    if do == "make":
        save(run, model, optimizer)
    else:
        load(run, model, optimizer)
    return digests(model, optimizer) if run["model"] in ("mtp", "mtp_moe", "bert") else []


def work(job):
    answers = []
    for run in job["runs"]:
        try:
            answers.append(one(job["do"], run))
        except Exception as error:  # the next run is another
            if "SHARDWRIGHT_TEST_KEEP" in os.environ:
                raise
            answers.append(f"{type(error).__name__}: {error}"[:2000])
        dist.barrier()
        with contextlib.suppress(AssertionError):
            parallel_state.destroy_model_parallel()
    for child in multiprocessing.active_children():  # of Megatron's writer, which would outlive the rank
        child.kill()
    return answers


if __name__ == "__main__":
    hop_ranks.main(work)
