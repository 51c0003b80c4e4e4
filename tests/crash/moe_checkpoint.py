"""Makes native DeepSpeed checkpoints of a small mixture-of-experts model with the standard library
alone. Every element follows from seed, tensor and iteration, so that what a restore must give can be
made the same way: a checkpoint whose experts are of other iterations than the rest."""

import array
import collections
import random

import ptfile

STATES = ("fp32", "exp_avg", "exp_avg_sq")
KINDS = {"fp32": ("FloatStorage", 4), "bf16": ("BFloat16Storage", 2)}


class Model:
    def __init__(self, layers=2, experts=4, ep=2, ranks=2, hidden=6, seed=0, dtype="fp32", extra=()):
        self.layers, self.experts, self.ep, self.ranks = layers, experts, ep, ranks
        self.hidden, self.seed, self.dtype = hidden, seed, dtype
        self.dense = {"emb.weight": (11, hidden)}
        for layer in range(layers):
            self.dense[f"blocks.{layer}.qkv.weight"] = (3 * hidden, hidden)
            self.dense[f"blocks.{layer}.moe.deepspeed_moe.gate.wg.weight"] = (experts, hidden)
        self.dense.update(extra)
        self.expert = {"0.weight": (hidden + 1, hidden), "2.weight": (hidden, hidden + 1)}

    def module(self, layer, expert):
        return f"blocks.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}"

    def data(self, name, state, shape, iteration):
        """The elements of a tensor as fp32. Masters have zeros where bf16 has no bits, so that
        rounding gives the weights."""
        count = 1
        for extent in shape:
            count *= extent
        numbers = random.Random(f"{self.seed} {name} {state} {iteration}")
        bits = array.array("I", numbers.randbytes(4 * count))
        mask, base = (0x83FF0000, 0x3C000000) if state == "fp32" else (0x03FFFFFF, 0x38000000)
        for i, value in enumerate(bits):
            bits[i] = value & mask | base
        return bits.tobytes()

    def weight(self, name, shape, iteration):
        data = self.data(name, "fp32", shape, iteration)
        if self.dtype == "bf16":
            data = array.array("H", data)[1::2].tobytes()
        kind, size = KINDS[self.dtype]
        return ptfile.tensor(kind, data, shape, size)


def flat(values):
    return ptfile.tensor("FloatStorage", values, (len(values) // 4,), 4)


def cut(whole, ranks, rank, strip):
    """A rank's partition of a flat buffer of `whole` bytes."""
    unit = 2 * ranks * 4
    padded = -(-len(whole) // unit) * unit
    each = padded // ranks
    part = whole[rank * each:(rank + 1) * each]
    return part if strip else part.ljust(each, b"\0")


def write(folder, model, iteration, versions=None, note="hello"):
    """Writes folder/latest and folder/global_step<iteration>.
    \\param versions  module -> iteration, or (module, state) -> iteration, of experts that are of
                     another iteration"""
    versions = versions or {}

    def version(module, state):
        return versions.get((module, state), versions.get(module, iteration))

    tag = folder / f"global_step{iteration}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    local = model.experts // model.ep
    experts = [(layer, e, suffix) for layer in range(model.layers) for e in range(local)
               for suffix in model.expert]
    shapes = [collections.OrderedDict((n, ptfile.size(*s)) for n, s in model.dense.items()),
              collections.OrderedDict((f"{model.module(layer, e)}.{suffix}",
                                       ptfile.size(*model.expert[suffix]))
                                      for layer, e, suffix in experts)]
    config = {"zero_optimization": {"stage": 2}}
    ptfile.save(tag / "mp_rank_00_model_states.pt", {
        "module": collections.OrderedDict((n, model.weight(n, s, iteration))
                                          for n, s in model.dense.items()),
        "buffer_names": [], "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": iteration - 1}, "global_steps": iteration,
        "dp_world_size": model.ranks, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": config,
        "ds_version": "0.19.8", "num_experts": [model.experts] * model.layers, "note": note,
        "random_state": ptfile.tensor("ByteStorage", random.Random(iteration).randbytes(100),
                                      (100,), 1),
        "placeholder": ptfile.tensor("FloatStorage", b"", (0,), 4)})
    for layer in range(model.layers):
        for e in range(model.experts):
            module = model.module(layer, e)
            ptfile.save(tag / f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt",
                        {f"{module}.{suffix}":
                         model.weight(f"{module}.{suffix}", shape, version(module, "weight"))
                         for suffix, shape in model.expert.items()})
    for rank in range(model.ranks):
        write_shard(tag, model, rank, iteration, experts, version, config)


def write_shard(tag, model, rank, iteration, experts, version, config):
    copies = model.ranks // model.ep
    place, ep_rank = rank // model.ep, rank % model.ep
    local = model.experts // model.ep
    parts = {}
    for state in STATES:
        dense = b"".join(model.data(n, state, s, iteration) for n, s in model.dense.items())
        moe = b""
        for layer, e, suffix in experts:
            module = model.module(layer, ep_rank * local + e)
            moe += model.data(f"{module}.{suffix}", state, model.expert[suffix],
                              version(module, state))
        strip = state == "fp32"
        parts[state] = [cut(dense, model.ranks, rank, strip), cut(moe, copies, place, strip)]
    step = array.array("f", [iteration]).tobytes()
    prefix = "bf16_" if model.dtype == "bf16" else ""
    ptfile.save(tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {
        "optimizer_state_dict": {
            "loss_scaler": None, "dynamic_loss_scale": False, "overflow": False, "clip_grad": 1.0,
            "base_optimizer_state": {
                "state": {g: {"step": ptfile.tensor("FloatStorage", step, (), 4),
                              "exp_avg": flat(parts["exp_avg"][g]),
                              "exp_avg_sq": flat(parts["exp_avg_sq"][g])} for g in (0, 1)},
                "param_groups": [{"lr": 0.1, "weight_decay": 0.1, "name": "all", "params": [0]},
                                 {"lr": 0.1, "weight_decay": 0.1, "name": f"ep_size_{model.ep}",
                                  "moe": True, "params": [1]}]},
            "single_partition_of_fp32_groups": [flat(part) for part in parts["fp32"]],
            "zero_stage": 2, "partition_count": [model.ranks, copies],
            "ds_version": "0.19.8"},
        "ds_config": config, "ds_version": "0.19.8"})


def series(folder, model, iterations):
    """One checkpoint for each iteration, and the tokens per expert of all up to the last.
    \\returns the file of tokens, {iteration: [layer][expert]}"""
    tokens = {}
    numbers = random.Random(model.seed)
    for iteration in range(1, max(iterations) + 1):
        tokens[iteration] = [[numbers.randrange(1, 100) for _ in range(model.experts)]
                             for _ in range(model.layers)]
    for iteration in iterations:
        write(folder, model, iteration)
    path = folder / "tokens.jsonl"
    path.write_text("".join(f'{{"iteration": {i}, "tokens": {t}}}\n' for i, t in tokens.items()))
    return path, tokens
