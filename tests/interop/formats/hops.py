# SPDX-License-Identifier: Apache-2.0
"""Trains a small model of transformers in DeepSpeed and in FSDP2, from checkpoints of either.

A run is a number of steps on the same batches in the same order for every trainer: a step takes BATCH samples, which
the ranks divide.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it sets the environment up
import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY, LENGTH, BATCH = 62, 12, 12
RATE = 2e-2


def make_model(family, seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False))


def make_optimizer(parameters):
    """Norms have no weight decay, as Megatron has it."""
    every = list(parameters)
    groups = [{"params": [one for one in every if one.dim() > 1], "weight_decay": 0.1},
              {"params": [one for one in every if one.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def batch(step):
    """The samples of a step: [BATCH, LENGTH]."""
    first = torch.arange(BATCH)[:, None] * 5 + step * 7
    return (first + torch.arange(LENGTH) * (1 + step % 3)) % VOCABULARY


def share_of_batch(step):
    """This rank's samples of a step: [samples, LENGTH]."""
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def mean_loss(loss):
    total = loss.detach().clone().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def load_into_engine(engine, source, _):
    if engine.load_checkpoint(source)[0] is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {source}")


def in_deepspeed(family, stage, source, output, steps, load_it=load_into_engine, bf16=False):
    """Collective. Trains the steps in the range, from checkpoint `source` if there is one; its losses."""
    model = make_model(family, 5 if source is None else 105)
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config={
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16}})
    if source is not None:
        load_it(engine, source, False)
    losses = []
    for step in range(*steps):
        tokens = share_of_batch(step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_loss(loss))
    if output is not None:
        engine.save_checkpoint(output)
    return losses


def in_fsdp2(family, source, output, steps, collectives=True):
    """Collective. The same with FSDP2 and torch.distributed.checkpoint; without collectives every rank saves an index of
    its own."""
    model = make_model(family, 5 if source is None else 105)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    if source is not None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses = []
    for step in range(*steps):
        tokens = share_of_batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss))
    if output is not None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=output, use_collectives=collectives)
    return losses
