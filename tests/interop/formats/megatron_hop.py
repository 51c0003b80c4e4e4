# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT of Megatron-Core that computes what a small Llama or Mixtral of transformers does, on the batches of
hops.py, from a torch_dist checkpoint. Megatron-Core wants CUDA; here it gets the CPU in its place.

    megatron_hop.py '{"family": "llama", "tp": 2, "ranks": 2, "source": ..., "steps": [4, 6], ...}'

Prints the losses as JSON in its last line. Runs in the environment of scripts/peers that has megatron-core.
"""

import os
import pathlib
import types
import typing

os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", TORCH_COMPILE_DISABLE="1", TORCHDYNAMO_DISABLE="1",
                  OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
import hop_ranks
import torch
import typing_extensions
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors requested on a GPU are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        answer = function(*args, **kwargs)
        # Buffers of gradients go by the name of the type.
        return answer.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and isinstance(answer, str) else answer


class Nothing:
    """A stream or an event without waits."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, _):
        return lambda *_, **__: self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def put_cpu_in_place_of_cuda():
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    cuda = torch.cuda
    state = [torch.zeros(16, dtype=torch.uint8)]
    cuda.current_device, cuda.device_count, cuda.set_device = lambda: torch.device("cpu"), lambda: 1, lambda _: None
    cuda.Stream = cuda.Event = cuda.stream = cuda.current_stream = cuda.default_stream = Nothing
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.get_rng_state = lambda *_: state[0].clone()
    cuda.manual_seed = lambda _: None
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0)
    OnCpu().__enter__()


put_cpu_in_place_of_cuda()
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
import megatron.core.tensor_parallel.random as megatron_random
from megatron.core.transformer import TransformerConfig

# Nothing here draws random numbers: no dropout, and weights come from a checkpoint.
megatron_random._get_cuda_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
megatron_random._set_cuda_rng_state = lambda *_, **__: None


def make_model(job):
    experts = {} if job["family"] == "llama" else {
        "num_moe_experts": job["experts"], "moe_router_topk": job["topk"], "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": job.get("ep", 1),
        "moe_router_pre_softmax": False}
    config = TransformerConfig(
        num_layers=job["layers"], hidden_size=job["hidden"], num_attention_heads=job["heads"],
        num_query_groups=job["kv_heads"], kv_channels=job["hidden"] // job["heads"], ffn_hidden_size=job["inner"],
        normalization="RMSNorm", layernorm_epsilon=job["epsilon"], activation_func=torch.nn.functional.silu,
        gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, use_cpu_initialization=True,
        tensor_model_parallel_size=job["tp"], pipeline_dtype=torch.float32, **experts)
    spec = get_gpt_layer_local_spec(num_experts=experts.get("num_moe_experts"), normalization="RMSNorm")
    model = GPTModel(config, spec, job["vocabulary"], job["length"], parallel_output=False, position_embedding_type="rope",
                     rotary_base=job["theta"], share_embeddings_and_output_weights=False)
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=False), model)


def make_optimizer(job, model):
    first, second = job["betas"]
    config = OptimizerConfig(optimizer="adam", lr=job["rate"], min_lr=0.0, weight_decay=job["decay"], adam_beta1=first,
                             adam_beta2=second, adam_eps=job["adam_epsilon"], clip_grad=0.0, bf16=False, fp16=False,
                             use_distributed_optimizer=False)
    return get_megatron_optimizer(config, [model])


def sharded(model, optimizer):
    weights = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    return {"model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)}


def load(model, optimizer, folder):
    asked = sharded(model, optimizer)
    state = {**asked.pop("model"), **asked}
    state = dist_checkpointing.load(state, str(folder))
    optimizer.load_state_dict(state.pop("optimizer"))
    held = model.module.state_dict()
    model.module.load_state_dict({key: value for key, value in state.items() if key in held})


def logits_of(model, tokens):
    length = tokens.shape[1]
    places = torch.arange(length).expand_as(tokens)
    return model(tokens, places, torch.ones(1, 1, length, length).triu(1).bool())


def train(job):
    parallel_state.initialize_model_parallel(job["tp"], expert_model_parallel_size=job.get("ep", 1))
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(105)
    model = make_model(job)
    optimizer = make_optimizer(job, model)
    load(model, optimizer, pathlib.Path(job["source"]))
    losses = []
    for step in range(*job["steps"]):
        tokens = torch.tensor(job["batches"][step - job["steps"][0]])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logits = logits_of(model, tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    hop_ranks.main(train)
