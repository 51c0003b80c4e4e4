# SPDX-License-Identifier: Apache-2.0
"""Random GPT models in Megatron: its own training loop, save_checkpoint and load_checkpoint, on the CPU.

    in_megatron.py

Reads jobs from stdin, one JSON object a line, and answers each with a line of JSON; runs in the environment of scripts/peers
that has megatron-core. Ranks are forks of this process. The tree of a run is what it saves with --dist-ckpt-optim-fully-reshardable:
names and whole tensors that do not depend on the layout, and the common state.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path[:0] = map(str, (pathlib.Path(__file__).resolve().parents[1] / "formats", pathlib.Path(__file__).resolve().parents[1]))

import megatron_hop  # first: it puts the CPU in the place of CUDA
import rank_process
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, mpu, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.utils import get_model_config
from megatron.training import arguments, checkpointing, global_vars, initialize, training

STEPS, NEXT = 2, 2  # before the checkpoint, and after it
SAMPLES, LENGTH, DIVISOR = 4, 6, 3
LAYOUT_ARGUMENTS = ("tensor_model_parallel", "tensor_parallel_num_weight_shards", "pipeline_model_parallel",
                    "expert_model_parallel", "expert_tensor_parallel", "world_size",
                    "data_parallel", "rank", "use_distributed_optimizer", "ckpt_", "dist_ckpt", "save", "load", "padded_vocab", "micro",
                    "sequence_parallel", "encoder_", "variable_seq", "num_distributed", "transformer_pipeline", "overlap_p2p", "iteration",
                    "perform_rl", "inprocess_", "align_", "expert_", "no_load", "finetune", "start", "local_rank", "num_experts_per", "consumed_valid")


def prepare():
    """Replaces other parts of Megatron that want CUDA, Transformer Engine or Apex."""
    filesystem_async.get_write_results_queue.__defaults__ = ("fork",)
    initialize._compile_dependencies = lambda: None
    torch.nn.Module.cuda = lambda module, *_: module
    torch.cuda.reset_peak_memory_stats = torch.cuda.set_rng_state = lambda *_, **__: None
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor)
    own_state_dict, set_states = DistributedOptimizer.state_dict, DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict(optimizer):
        """Before the first step PyTorch's Adam has no states, and Megatron asks for their step."""
        for weight in (weight for group in optimizer.optimizer.param_groups for weight in group["params"]):
            if not optimizer.optimizer.state[weight]:
                optimizer.optimizer.state[weight].update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(weight),
                                                         exp_avg_sq=torch.zeros_like(weight))
        return own_state_dict(optimizer)

    def with_step(optimizer, weight, tensors):
        step = optimizer._get_main_param_and_optimizer_states(weight)["step"]
        return set_states(optimizer, weight, {**tensors, "step": step})

    DistributedOptimizer.state_dict, DistributedOptimizer._set_main_param_and_optimizer_states = state_dict, with_step


prepare()


def batch_of(model):
    """(samples in a batch, tokens of a sample)."""
    return model.get("samples", SAMPLES), model.get("length", LENGTH)


def command_line(model, layout, load):
    """Megatron's arguments."""
    batch, length = batch_of(model)
    words = f"""--num-layers {model["layers"]} --hidden-size {model["hidden"]} --ffn-hidden-size {model["inner"]}
        --num-attention-heads {model["heads"]} --kv-channels 6 --seq-length {length} --max-position-embeddings {length}
        --vocab-size {model["vocabulary"]} --make-vocab-size-divisible-by {DIVISOR} --tokenizer-type NullTokenizer
        --normalization {model["norm"]} --position-embedding-type rope --group-query-attention
        --num-query-groups {model["kv_heads"]} --tensor-model-parallel-size {layout["tp"]}
        --pipeline-model-parallel-size {layout["pp"]} --expert-model-parallel-size {layout["ep"]}
        --expert-tensor-parallel-size {layout["tp"]} --micro-batch-size 1 --global-batch-size {batch} --lr 2e-2 --min-lr 1e-3
        --lr-decay-style cosine --lr-warmup-iters 3 --train-iters 20 --weight-decay 0.1 --adam-beta2 0.95 --seed {model["seed"]}
        --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --use-cpu-initialization --init-method-std 0.2
        --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
        --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --disable-jit-fuser --distributed-backend gloo
        --ckpt-format torch_dist --rerun-mode disabled""".split()
    flags = {"--untie-embeddings-and-output-weights": not model["tied"], "--swiglu": model["gated"],
             "--disable-bias-linear": not model["bias"], "--bf16": model["bf16"],
             "--accumulate-allreduce-grads-in-fp32": model["bf16"], "--use-distributed-optimizer": layout["optimizer"] != "none",
             "--dist-ckpt-optim-fully-reshardable": layout["optimizer"] == "fully_reshardable",
             "--no-load-rng": bool(load)}
    words += [flag for flag, wanted in flags.items() if wanted]
    if model["experts"]:
        words += f"""--num-experts {model["experts"]} --moe-router-topk 2 --moe-ffn-hidden-size 6 --moe-token-dispatcher-type alltoall
            --moe-router-load-balancing-type none --moe-router-dtype fp32""".split()
    return [*words, *model.get("more", ()), *(["--load", str(load)] if load else [])]


def build(model, layout, load):
    """(arguments, model, optimizer, scheduler), loaded by Megatron if there is something to load."""
    sys.argv = ["train", *command_line(model, layout, load)]
    args = arguments.parse_args()
    arguments.validate_args(args)
    global_vars.set_global_variables(args, build_tokenizer=False)
    each = DIVISOR * layout["tp"]
    args.padded_vocab_size = -(-args.vocab_size // each) * each
    initialize.initialize_megatron(allow_no_cuda=True)

    def provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        config = arguments.core_transformer_config_from_args(args)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage) if model["experts"] else (
            get_gpt_layer_local_spec(normalization=args.normalization))
        return GPTModel(config, spec, args.padded_vocab_size, batch_of(model)[1], pre_process, post_process, parallel_output=True,
                        share_embeddings_and_output_weights=model["tied"], position_embedding_type="rope", vp_stage=vp_stage)

    made, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, provider)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in one.optimizer.state.values():  # after a load all parameters share one tensor, which each of them would count up
            state["step"] = state["step"].clone()
    config = get_model_config(made[0])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    for chunk in made:
        chunk.train()
    return args, made, optimizer, scheduler


def samples(model, step):
    """Those of this data-parallel rank, one by one."""
    batch, length = batch_of(model)
    x = torch.randint(0, model["vocabulary"], (batch, length), generator=torch.Generator().manual_seed(1000 + step))
    for at in range(mpu.get_data_parallel_rank(), batch, mpu.get_data_parallel_world_size()):
        yield x[at:at + 1], (x[at:at + 1] * 3 + 1) % model["vocabulary"]


def forward_step(model):
    """The function that Megatron calls for a micro batch. Padding of the vocabulary takes no part in the loss."""
    def forward(iterator, chunk):
        x, y = next(iterator)
        length = x.shape[1]
        mask = torch.ones(1, 1, length, length).tril() < 0.5

        def loss_of(logits):
            scores = logits.float()
            first = mpu.get_tensor_model_parallel_rank() * scores.shape[-1]
            scores = scores.masked_fill(torch.arange(first, first + scores.shape[-1]) >= model["vocabulary"], -1e9)
            losses = tensor_parallel.vocab_parallel_cross_entropy(scores.transpose(0, 1).contiguous(), y.T.contiguous())
            return losses.mean(), {"loss": torch.stack([losses.detach().sum(), torch.tensor(float(losses.numel()))])}

        return chunk(x, torch.arange(length)[None], mask), loss_of
    return forward


def train_step(run, model, step, batch=None):
    """Collective. The loss of one step with this rank's samples in `batch`, or else with samples()."""
    args, made, optimizer, scheduler = run
    answer = training.train_step(forward_step(model), batch or samples(model, step), made, optimizer, scheduler, get_model_config(made[0]),
                                 get_forward_backward_func(), iteration=step)
    args.consumed_train_samples += batch_of(model)[0]
    args.iteration = args.curr_iteration = step + 1
    found = torch.tensor([float(answer[0]["loss"]) if answer[0] else 0.0, float(bool(answer[0]))], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found[0] / found[1])


def save(run, folder, fully):
    """Collective."""
    args = run[0]
    args.save, args.dist_ckpt_optim_fully_reshardable = str(folder), fully
    checkpointing.save_checkpoint(args.iteration, *run[1:], 12345)


def tree_of(run, model, folder):
    """Collective. Writes folder.pt."""
    save(run, folder, True)
    if dist.get_rank() == 0:
        inside = folder / f"iter_{run[0].iteration:07}"
        entries = dcp.FileSystemReader(inside).read_metadata().state_dict_metadata
        tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items() if hasattr(entry, "size")}
        dcp.load(tensors, checkpoint_id=inside, no_dist=True)
        rows = model["vocabulary"]
        whole = {key.replace(".fp32_param.", ".param."): tensor[:rows] if "word_embeddings" in key or "output_layer" in key else tensor
                 for key, tensor in tensors.items()}
        if not model["bf16"]:  # the weights are their own masters, which a regular optimizer does not save again
            whole = {key: tensor for key, tensor in whole.items() if not key.startswith("optimizer.state.param.")}
        objects = sorted(key for key in entries if key not in tensors and "rng_state" not in key)
        torch.save({"tensors": whole, "objects": objects, "common": common_of(inside)}, f"{folder}.pt")
        shutil.rmtree(folder)
    dist.barrier()


def common_of(inside):
    """The common state without what the layout makes of it; a plain tree."""
    common = dist_checkpointing.load_common_state_dict(str(inside))
    args = vars(common.pop("args"))
    common.pop("content_metadata", None)
    common.pop("rng_state", None)
    found = {key: value for key, value in args.items() if not key.startswith(LAYOUT_ARGUMENTS) and isinstance(
        value, (int, float, str, bool, type(None)))}
    steps, groups = set(), set()
    collect_groups(common.pop("optimizer"), steps, groups)
    return plain(common) | {"args": found, "optimizer_steps": sorted(steps), "groups": sorted(groups)}


def collect_groups(value, steps, groups):
    """Experts that are divided between ranks have an optimizer of their own, and a regular optimizer has its step
    elsewhere: the steps remain, and the different groups as JSON."""
    if isinstance(value, dict) and "param_groups" in value:
        for group in value["param_groups"]:
            kept = {key: one for key, one in plain(group).items() if key not in ("step", "is_expert_parallel")}
            groups.add(json.dumps(kept, sort_keys=True))
            if "step" in group:
                steps.add(float(group["step"]))
    if isinstance(value, dict):
        if "common_step" in value:
            steps.add(float(value["common_step"]))
        for one in value.values():
            collect_groups(one, steps, groups)


def plain(value):
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items() if key != "params"}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float, str, bool, type(None), torch.Tensor)) else str(type(value))


def make(job):
    """Collective. Trains, saves job["output"], and its tree; the losses of the steps after it."""
    model = job["model"]
    run = build(model, job["layout"], None)
    for step in range(STEPS):
        train_step(run, model, step)
    save(run, job["output"], job["layout"]["optimizer"] == "fully_reshardable")
    tree_of(run, model, pathlib.Path(job["tree"]))
    return [train_step(run, model, STEPS + step) for step in range(NEXT)]


def resume(job):
    """Collective. The same after a load into other weights."""
    model = job["model"]
    run = build(model | {"seed": model["seed"] + 1}, job["layout"], job["source"])
    if run[0].iteration != STEPS:
        raise AssertionError(f"Megatron continues from iteration {run[0].iteration}, expected {STEPS}")
    tree_of(run, model, pathlib.Path(job["tree"]))
    return [train_step(run, model, STEPS + step) for step in range(NEXT)]


def rank_main(rank, world, job, folder):
    """The life of a rank, in a process group of its own; never returns."""
    os.setpgid(0, 0)

    def live():
        rank_process.name_rank(rank, world)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        answer = {"make": make, "resume": resume}[job["do"]](job)
        (folder / f"answer{rank}").write_text(json.dumps(answer))
        dist.barrier()

    rank_process.become(folder / f"log{rank}", live)


def run_job(job):
    """{"losses": ...} or {"error": the end of the first log of a rank that failed}."""
    world = job["layout"]["tp"] * job["layout"]["pp"] * job["layout"]["dp"]
    with tempfile.TemporaryDirectory(prefix="sw-megatron-") as name:
        folder, left, failed = pathlib.Path(name), {}, None
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                rank_main(rank, world, job, folder)
            left[pid] = rank
        while left:
            pid, status = rank_process.wait_for_any()
            rank = left.pop(pid, None)
            if status and rank is not None and failed is None:
                failed = rank
                for other in left:
                    os.kill(other, signal.SIGKILL)
        if failed is not None:
            return {"error": (folder / f"log{failed}").read_text(errors="replace")[-3000:]}
        return {"losses": json.loads((folder / "answer0").read_text())}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Megatron's prints must not mix with the answers
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            answer = run_job(json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
