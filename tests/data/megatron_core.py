#!/usr/bin/env python3
"""Makes the checkpoints in tests/data/megatron with Megatron-Core on CPU ranks.

Usage: megatron_core.py OUTPUT

OUTPUT/<case>/ckpt            what Megatron's save_checkpoint wrote
OUTPUT/<case>/expected.safetensors  every tensor as the ranks held it, whole: NAME/fp32, NAME/exp_avg, NAME/exp_avg_sq, NAME/computed
dist_buckets_dp2  torch_dist, dp_reshardable: gradient buckets of two data-parallel ranks, several of them
dist_full_tp2     torch_dist, fully_reshardable, two tensor-parallel ranks
legacy_pp2        mp_rank_* with distrib_optim.pt, two pipeline stages, embeddings tied

The model is Megatron's GPT with one layer for each stage at least; its gradients are drawn by name, which takes no forward
pass, and what Megatron does with CUDA is done on the CPU.
"""

import contextlib
import os
import pathlib
import re
import sys
import traceback
import types
import typing
import warnings
import zlib

os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import typing_extensions
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

STEPS = 2
VOCABULARY = 16
CASES = {
    "dist_buckets_dp2": "--overlap-grad-reduce --ddp-bucket-size 300 --untie-embeddings-and-output-weights",
    "dist_full_tp2": "--tensor-model-parallel-size 2 --dist-ckpt-optim-fully-reshardable --untie-embeddings-and-output-weights",
    "legacy_pp2": "--pipeline-model-parallel-size 2 --ckpt-format torch",
}
WORDS = """--num-layers 2 --hidden-size 8 --ffn-hidden-size 6 --num-attention-heads 2 --kv-channels 4 --seq-length 4
    --max-position-embeddings 4 --vocab-size 16 --make-vocab-size-divisible-by 4 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 4 --lr 0.01 --train-iters 8 --weight-decay 0.1 --normalization RMSNorm
    --position-embedding-type rope --swiglu --disable-bias-linear --bf16 --use-distributed-optimizer
    --accumulate-allreduce-grads-in-fp32 --transformer-impl local --use-cpu-initialization --init-method-std 0.2
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --disable-jit-fuser --distributed-backend gloo --rerun-mode disabled"""


class OnTheCpu(TorchFunctionMode):
    """A CUDA device is the CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        # Megatron knows a parameter that has a master weight by the name of its class.
        return result.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and isinstance(result, str) else result


class Idle:
    """A stream of which nothing has to be waited for."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def without_cuda():
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    cuda, drawn = torch.cuda, [torch.zeros(16, dtype=torch.uint8)]
    cuda.current_device, cuda.device_count, cuda.set_device = lambda: torch.device("cpu"), lambda: 1, lambda _: None
    for name in ("current_stream", "default_stream", "Stream", "Event", "stream"):
        setattr(cuda, name, Idle)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: drawn[0].clone()
    cuda.set_rng_state = lambda state, *_, **__: drawn.__setitem__(0, state.clone())
    cuda.manual_seed = lambda seed: cuda.set_rng_state(torch.tensor([seed, 0]).view(torch.uint8))
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0)
    torch.nn.Module.cuda = lambda self, *_: self
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    OnTheCpu().__enter__()
    from megatron.core.tensor_parallel import random
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    random._set_cuda_rng_state = cuda.set_rng_state
    filesystem_async.get_write_results_queue.__defaults__ = ("fork",)


def built(words):
    """The model in its layout, its optimizer and schedule."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import arguments, global_vars, initialize, training
    from megatron.training.vocab_utils import calculate_padded_vocab_size
    initialize._compile_dependencies = lambda: None  # helpers of data sets
    sys.argv = ["train", *WORDS.split(), *words.split()]
    args = arguments.parse_args()
    arguments.validate_args(args)
    global_vars.set_global_variables(args, build_tokenizer=False)
    args.padded_vocab_size = calculate_padded_vocab_size(VOCABULARY, 4, args.tensor_model_parallel_size, False)
    initialize.initialize_megatron(allow_no_cuda=True)

    def provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        return GPTModel(arguments.core_transformer_config_from_args(args),
                        get_gpt_layer_local_spec(normalization=args.normalization), args.padded_vocab_size, args.seq_length,
                        pre_process, post_process, position_embedding_type=args.position_embedding_type,
                        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, vp_stage=vp_stage)

    return args, *training.setup_model_and_optimizer(ModelType.encoder_or_decoder, provider)


def names_of(module):
    """(name in the whole model, parameter) of a stage."""
    layers = {name: f"decoder.layers.{part.layer_number - 1}" for name, part in module.named_modules()
              if re.fullmatch(r"decoder\.layers\.\d+", name)}
    for name, parameter in module.named_parameters():
        whole = re.sub(r"^decoder\.layers\.\d+", lambda found: layers[found[0]], name)
        tied = name == "output_layer.weight" and module.share_embeddings_and_output_weights
        yield "embedding.word_embeddings.weight" if tied else whole, parameter


def step(module, optimizer, number):
    for name, parameter in names_of(module):
        seed = zlib.crc32(f"{name} {number}".encode())
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    optimizer.step()


def held(module, optimizer):
    """(name, what) -> what this rank has: tensor rank, place in its shard, shape of the shard, elements."""
    from megatron.core import mpu
    out, rank = {}, mpu.get_tensor_model_parallel_rank()
    optimizer = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    for name, parameter in names_of(module):
        out[name, "computed"] = rank, 0, parameter.shape, parameter.detach().float().flatten()
        if parameter not in optimizer.model_param_gbuf_map:
            continue
        first = optimizer._get_model_param_range_map(parameter)["param"].start
        group, index = optimizer.model_param_group_index_map[parameter]
        master = optimizer.optimizer.param_groups[group]["params"][index]
        state = optimizer.optimizer.state[master]
        for what, tensor in ("fp32", master), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"]):
            out[name, what] = rank, first, parameter.shape, tensor.detach().clone()
    return out


def whole(name, parts):
    """A tensor of its tensor-parallel parts."""
    if len(parts) == 1 or "norm" in name:
        return parts[0]
    if "linear_fc1" in name:  # each has its part of the gate above its part of what is gated
        parts = [half for i in (0, 1) for half in (part.chunk(2)[i] for part in parts)]
    return torch.cat(parts, 1 if re.search(r"linear_(proj|fc2)\.", name) else 0)


def gathered(module, optimizer):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, held(module, optimizer))
    out = {}
    for name, what in sorted({key for one in every for key in one}):
        parts = {}
        for rank, first, shape, elements in (one[name, what] for one in every if (name, what) in one):
            part = parts.setdefault(rank, torch.zeros(shape, dtype=elements.dtype))
            part.flatten()[first:first + elements.numel()] = elements
        out[f"{name}/{what}"] = whole(name, [parts[rank] for rank in sorted(parts)]).contiguous().clone()
    return out


def run(rank, folder, words, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the files must not tell where they were written
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        args, model, optimizer, schedule = built(words)
        from megatron.core.utils import unwrap_model
        from megatron.training import checkpointing
        module, = unwrap_model(model)
        for number in range(STEPS):
            step(module, optimizer, number)
        args.save, args.iteration = "ckpt", STEPS
        expected = gathered(module, optimizer)
        checkpointing.save_checkpoint(STEPS, model, optimizer, schedule, 0)
    if rank == 0:
        save_file(expected, "expected.safetensors")
    dist.barrier()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = pathlib.Path(sys.argv[1]).resolve()
    without_cuda()
    for number, (case, words) in enumerate(CASES.items()):
        ranks = []
        for rank in range(2):
            process = os.fork()
            if process == 0:
                try:
                    run(rank, output / case, words, 29580 + number)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            ranks.append(process)
        failed = [rank for rank in ranks if os.waitpid(rank, 0)[1] != 0]
        if failed:
            sys.exit(f"{case}: {len(failed)} of its ranks failed")


if __name__ == "__main__":
    main()
