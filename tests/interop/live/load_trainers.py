# SPDX-License-Identifier: Apache-2.0
"""The trainers that load_matrix.py fills: their models are those of the scripts that made the samples, and every tensor is
compared with the value that such a script had in memory when it saved. Each check is collective, on the ranks that
ranks.run makes, and returns
{"wrong": [...], "tensors": how many, "loss_off": largest difference of a next loss; None if there is none}.
"""

import ast
import json
import math
import pathlib
import sys
import types

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import live

NOTE = "client state must survive"
# Losses that are compared after a load into a trainer of another kind than that of the sample: that of the weights, and that
# of a step of the optimizer. What follows hangs on the schedule of the learning rate, which is not carried between them.
STEPS_ELSEWHERE = 2
OFF = {"fp32": 5e-5, "bf16": 2e-2, "fp16": 1e-2}  # possible effect of another order of additions on a loss


def script(path):
    """A script as a module: without its last statement, which runs it."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    last = ast.unparse(tree.body.pop())
    if last != "main()":
        raise ValueError(f"{path}: ends with {last!r}, main() expected")
    module = types.ModuleType(path.stem)
    exec(compile(tree, str(path), "exec"), module.__dict__)  # pylint: disable=exec-used
    return module


def differing(want, got):
    """Names of tensors that are not bit for bit as they should be."""
    def alike(one, other):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
            one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    return sorted(name for name in want.keys() | got.keys()
                  if name not in want or name not in got or not alike(want[name], got[name]))


class Sample:
    """A checkpoint, and the state of its trainer."""

    def __init__(self, fixtures, source):
        self.folder = fixtures / source
        self.folder = next(above for above in (self.folder, *self.folder.parents) if (above / "case.json").exists())
        self.known = json.loads((self.folder / "case.json").read_text(encoding="utf-8"))
        self.own = script(fixtures / ("train_deepspeed.py" if source.startswith("deepspeed/") else "train_torch.py"))
        self.case, self.losses = self.known["case"], self.known["losses"]
        # The script saves after step 4, and in a series after each one from then on.
        self.steps = self.own.STEPS + max(self.case.get("series", 1), 1) - 1
        # Without ZeRO DeepSpeed's optimizers of 16-bit weights make a step with gradients of zero at first, and count it.
        first = self.case.get("zero") == 0 and self.case.get("dtype", "fp32") != "fp32"
        self.optimizer_steps = self.steps + first

    def samples(self):
        """The engine's counter, as its files have it."""
        files = sorted((self.folder / f"ckpt/global_step{self.steps}").glob("*model_states.pt"))
        return torch.load(files[-1], weights_only=False)["global_samples"]

    def expected(self, restored=None):
        """Every tensor, whole; of a store in the versions of modules that the restore has reported."""
        series = self.case.get("series")
        newest = load_file(self.folder / (f"expected_{self.steps}.safetensors" if series else "expected.safetensors"))
        if not restored:
            return newest
        kept = {version: load_file(self.folder / f"expected_{version}.safetensors")
                for version in {restored["iteration"], *restored["versions"].values()}}

        def version(name):
            return next((found for module, found in restored["versions"].items() if name.startswith(module + ".")),
                        restored["iteration"])
        return {name: kept[version(name)][name] for name in newest}


def load(target, source, **options):
    import shardwright
    return shardwright.load(target, source, threads=1, **options)


def told_wrong(loaded, sample):
    wrong = [] if int(loaded) == sample.steps else [f"{int(loaded)} steps told, {sample.steps} were made"]
    return wrong + [f"missing {name}" for name in loaded.missing] + [f"unused {name}" for name in loaded.unused]


def answer(sample, want, got, wrong, losses, dtype):
    """Ranks agree on the tensors, since each has gathered them; losses are means over all."""
    wanted = sample.losses[:len(losses)]
    off = max((abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf for one, other in zip(losses, wanted)),
              default=None)
    wrong = wrong + differing(want, got)
    if off is not None and off > OFF[dtype]:
        wrong.append(f"losses {losses} for {wanted}")
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, wrong)
    return {"wrong": sorted(set(sum(told, []))), "tensors": len(want), "loss_off": off}


def row_of_stages(own, case):
    """The layers of a pipeline module, in a row without a pipeline: its names of parameters."""
    class Row(torch.nn.Sequential):
        def forward(self, x, y):  # pylint: disable=arguments-differ
            return own.pipe_loss(super().forward(x), y)

    torch.manual_seed(case["seed"])
    return Row(own.EmbPipe(case), *(own.Block(case, layer) for layer in range(case["layers"])), own.HeadPipe(case))


def case_of(sample, changes):
    """Of an engine: other weights and buffers than those of the sample's."""
    case = sample.own.D | sample.case | {"llama": bool(sample.case.get("tp") or sample.case.get("llama")), "fresh": True} | changes
    case["seed"] += 1000
    if case["pp"] > 1:
        sample.own.build = lambda whole: row_of_stages(sample.own, whole)
        case |= {"pp": 1, "pipe": False}
    return case | {"tp": 1}


def sixteen_bit_differs(engine, case, want):
    """Weights that are not their masters, rounded once."""
    from deepspeed.utils import groups
    wrong = []
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        if "deepspeed_experts." in name:
            before, number, after = name.partition("deepspeed_experts.")[0], *name.partition("deepspeed_experts.")[2].split(".", 1)
            here = case["moe"] // case["ep"]
            name = f"{before}deepspeed_experts.{groups._get_expert_parallel_rank(param.group_name) * here + int(number)}.{after}"
        with deepspeed.zero.GatheredParameters([param], enabled=case["zero"] == 3):
            if not torch.equal(param.detach(), want[f"{name}/fp32"].to(param.dtype)):
                wrong.append(f"{name}: not its master, rounded")
    return wrong


def engine(fixtures, source, where, changes):
    """A DeepSpeed engine, of a DeepSpeed checkpoint."""
    sample = Sample(fixtures, source)
    case = case_of(sample, changes)
    made = sample.own.engine_of(case)
    loaded = load(made, where)
    wrong = told_wrong(loaded, sample)
    if loaded.client_state.get("note") != NOTE:
        wrong.append(f"client state {loaded.client_state}")
    samples = sample.samples()
    if (made.global_steps, made.global_samples) != (sample.steps, samples):
        wrong.append(f"{made.global_steps} steps and {made.global_samples} samples, {sample.steps} and {samples} were made")
    want = sample.expected(loaded.restored)
    got = sample.own.collect(made, case)
    wrong += sixteen_bit_differs(made, case, want)
    losses = [sample.own.train_step(made, case, sample.steps + step) for step in range(sample.own.STEPS)]
    if loaded.restored and loaded.restored["versions"]:
        losses = []  # of experts that are of different steps there is no run to compare with
    dtype = max(case["dtype"], (sample.own.D | sample.case)["dtype"], key=OFF.get)
    return answer(sample, want, got, wrong, losses, dtype)


def plain_state(model, optimizer):
    """State in the form of the scripts."""
    found = {name.replace("/weight", "/fp32"): tensor.float() for name, tensor in live.state_of(model, optimizer).items()
             if not name.endswith("/step")}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            found[f"{name}/frozen"] = found.pop(f"{name}/fp32")
    return found | {f"{name}/buffer": buffer.float() for name, buffer in model.named_buffers() if "rotary" not in name}


def steps_of(optimizer, steps):
    """The differences in the numbers of steps."""
    told = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    return [] if told <= {float(steps)} else [f"the optimizer has made {sorted(told)} steps, not {steps}"]


def engine_model_elsewhere(fixtures, source, where, changes):
    """The model of a DeepSpeed checkpoint in FSDP2 (layout fsdp2, hsdp) or DDP or by itself (ddp, single)."""
    sample, layout = Sample(fixtures, source), changes.pop("layout")
    case, world = case_of(sample, changes | {"dtype": "fp32"}), dist.get_world_size()
    model = sample.own.build(case)
    groups = [{key: value for key, value in group.items() if key != "name"} for group in sample.own.groups_of(model, case)]
    if layout in ("fsdp2", "hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2) if layout == "hsdp" else (world,),
                                mesh_dim_names=("copies", "shards") if layout == "hsdp" else ("shards",))
        places = {param: name for name, param in model.named_parameters()}
        for group in groups:
            group["names"] = [places[param] for param in group.pop("params")]
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} != set(places.values())
        for block in () if tied else [part for part in model.modules() if type(part).__name__ in ("Block", "LlamaDecoderLayer")]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        params = dict(model.named_parameters())
        for group in groups:
            group["params"] = [params[name] for name in group.pop("names")]
    optimizer = torch.optim.SGD(groups, lr=9, momentum=0.5) if case["opt"] == "sgd" else torch.optim.AdamW(groups, lr=9)
    called = torch.nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model
    loaded = load((called, optimizer), where)
    want, got = sample.expected(), plain_state(model, optimizer)
    wrong = told_wrong(loaded, sample) + steps_of(optimizer, sample.optimizer_steps)
    if loaded.client_state.get("note") != NOTE or not any("client state (" in one and "note" in one for one in loaded.not_carried):
        wrong.append(f"client state {loaded.client_state}, not set: {loaded.not_carried}")
    got |= {name: tensor for name, tensor in want.items() if name.endswith("/alias_of")}  # equal under both names
    losses, share = [], case["batch"] // world
    for step in range(STEPS_ELSEWHERE):
        x, y = (part[dist.get_rank() * share:][:share] for part in sample.own.batch_at(case, sample.steps + step))
        if case["llama"]:
            loss = functional.cross_entropy(called(input_ids=x).logits.float().flatten(0, 1), y.flatten())
        else:
            loss = called(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the script has DeepSpeed do it
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean / world))
    return answer(sample, want, got, wrong, losses, (sample.own.D | sample.case)["dtype"])


def torch_case(sample, changes):
    own = sample.own
    case = own.LAYOUT | own.MODEL | {key: value for key, value in sample.case.items() if key in own.MODEL} | changes
    return case | {"seed": case["seed"] + 1000}


def spoil(model):
    """Nothing may be right by accident."""
    for buffer in model.buffers():
        buffer.mul_(0.5)


def parallel(fixtures, source, where, changes):
    """FSDP2, HSDP and tensor parallelism, of a DCP checkpoint."""
    sample = Sample(fixtures, source)
    case = torch_case(sample, changes)
    run = sample.own.build(case)
    spoil(run[0])
    loaded = load(run[:2], where)
    wrong, got = told_wrong(loaded, sample) + steps_of(run[1], sample.optimizer_steps), sample.own.collect(run)
    # The scheduler is the program's; rates of the groups came with the optimizer.
    run[2].last_epoch, run[2]._step_count = sample.steps, sample.steps + 1
    run[2]._last_lr = [group["lr"] for group in run[1].param_groups]
    losses = [sample.own.train_step(run, case, sample.steps + step) for step in range(sample.own.STEPS)]
    return answer(sample, sample.expected(), got, wrong, losses, "bf16" if case["bf16"] else "fp32")


def parallel_model_in_engine(fixtures, source, where, changes):
    """The model of a DCP checkpoint in a DeepSpeed engine."""
    sample = Sample(fixtures, source)
    deep = script(fixtures / "train_deepspeed.py")
    case, world = torch_case(sample, {}), dist.get_world_size()
    torch.manual_seed(case["seed"])
    model = sample.own.Net(case)
    spoil(model)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [one for one in params if one.dim() > 1], "weight_decay": 0.3},
                                   {"params": [one for one in params if one.dim() <= 1]}], lr=9)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": case["batch"] // world, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": changes["zero"], **({"stage3_param_persistence_threshold": 10} if changes["zero"] == 3 else {})}})
    loaded = load(made, where)
    wrong = told_wrong(loaded, sample)
    asked = deep.D | changes | {"moe": 0}  # experts that share one tensor are parameters like others
    want, got = sample.expected(), deep.collect(made, asked)
    wrong += sixteen_bit_differs(made, asked, want)
    losses, share = [], case["batch"] // world
    for step in range(STEPS_ELSEWHERE):
        x, y = (part[dist.get_rank() * share:][:share] for part in sample.own.batch_at(case, sample.steps + step))
        loss = functional.cross_entropy(made(x).flatten(0, 1), y.flatten())
        made.backward(loss)
        made.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean / world))
    return answer(sample, want, got, wrong, losses, "bf16" if case["bf16"] else "fp32")


def weights(fixtures, source, where, changes):
    """The weights alone, of safetensors files."""
    sample = Sample(fixtures, source)
    case, world = torch_case(sample, {}), dist.get_world_size()
    torch.manual_seed(case["seed"])
    if case["llama"]:
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=case["vocab"], hidden_size=case["h"], intermediate_size=2 * case["h"] + 1, num_hidden_layers=case["layers"],
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False))
        for param in model.parameters():
            param.data = param.data.bfloat16()
    else:
        model = sample.own.Net(case)
        spoil(model)
    if changes["layout"] == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    called = torch.nn.parallel.DistributedDataParallel(model) if changes["layout"] == "ddp" else model
    loaded = load(called, where)
    wrong = [f"missing {name}" for name in loaded.missing] + [f"unused {name}" for name in loaded.unused]
    kind = "bf16" if case["llama"] else "fp32"
    got = {name.replace("/weight", f"/{kind}"): tensor for name, tensor in live.state_of(model, None).items()}
    got |= {f"{name}/buffer": buffer for name, buffer in model.named_buffers() if "rotary" not in name}
    want = {name: tensor for name, tensor in sample.expected().items() if name.endswith((f"/{kind}", "/buffer"))}
    x, y = sample.own.batch_at(case, 0 if case["llama"] else sample.steps)
    with torch.no_grad():
        scores = called(x)
        loss = functional.cross_entropy((scores.logits if case["llama"] else scores).float().flatten(0, 1), y.flatten())
    return answer(sample, want, got, wrong, [float(loss)], kind)


JUDGES = {"deepspeed": {"deepspeed": engine, "torch": engine_model_elsewhere},
          "torch": {"torch": parallel, "deepspeed": parallel_model_in_engine, "weights": weights}}


def judge(fixtures, source, where, trainer, changes):
    """Collective. Fills the trainer of a row from `where`, which was made of the sample `source`."""
    sys.path.insert(0, live.PACKAGE)
    dist.barrier()
    return JUDGES[source.split("/")[0]][trainer](pathlib.Path(fixtures), source, where, dict(changes))
