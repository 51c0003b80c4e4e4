# SPDX-License-Identifier: Apache-2.0
"""Makes native DeepSpeed checkpoints of a small mixture-of-experts model with the standard library
alone. Every element follows from seed, tensor and iteration, so that the expected result of a
restore can be made the same way: a checkpoint with experts of other iterations than the rest."""

import array
import collections
import random

import ptfile

STATES = ("fp32", "exp_avg", "exp_avg_sq")
NOT_IN_OLD = ("buffer_names", "param_shapes", "frozen_param_shapes", "shared_params",
              "frozen_param_fragments", "optimizer", "checkpoint_parallel_dimensions", "ds_config",
              "ds_version")
KINDS = {"fp32": ("FloatStorage", 4), "bf16": ("BFloat16Storage", 2)}


class Model:
    """release: the DeepSpeed release that defines the form. Before 0.19.3 model states with experts do
    not list names and shapes; before 0.14.5 slices describe only the first 1/ep of the experts.
    frozen: names inside an expert that are not trained. order: of the experts' parameters in the
    flat buffer, from that of the model."""

    def __init__(self, layers=2, experts=4, ep=2, ranks=2, hidden=6, seed=0, dtype="fp32", extra=(),
                 release=(0, 19, 8), expert=(), frozen=(), buffers=(), order=list,
                 config=None):
        self.layers, self.experts, self.ep, self.ranks = layers, experts, ep, ranks
        self.hidden, self.seed, self.dtype = hidden, seed, dtype
        self.dense = {"emb.weight": (11, hidden)}
        for layer in range(layers):
            self.dense[f"blocks.{layer}.qkv.weight"] = (3 * hidden, hidden)
            self.dense[f"blocks.{layer}.moe.deepspeed_moe.gate.wg.weight"] = (experts, hidden)
        self.dense.update(extra)
        self.expert = {"0.weight": (hidden + 1, hidden), "2.weight": (hidden, hidden + 1)}
        self.expert.update(expert)
        self.release, self.frozen, self.order = release, frozen, order
        self.buffers = dict(buffers)
        self.config = {"zero_optimization": {"stage": 2}} if config is None else config

    def module(self, layer, expert):
        return f"blocks.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}"

    def step(self, iteration):
        """Steps that the optimizer has made."""
        return iteration

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
    experts = model.order([(layer, e, suffix) for layer in range(model.layers) for e in range(local)
                           for suffix in model.expert if suffix not in model.frozen])
    shapes = [collections.OrderedDict((n, ptfile.size(*s)) for n, s in model.dense.items()),
              collections.OrderedDict((f"{model.module(layer, e)}.{suffix}",
                                       ptfile.size(*model.expert[suffix]))
                                      for layer, e, suffix in experts)]
    version_text = ".".join(map(str, model.release))
    states = {
        "module": collections.OrderedDict(
            (n, model.weight(n, s, iteration)) for n, s in (model.dense | model.buffers).items()),
        "buffer_names": list(model.buffers), "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": iteration - 1}, "global_steps": iteration,
        "dp_world_size": model.ranks, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": model.config, "ds_version": version_text,
        "num_experts": [model.experts] * model.layers, "note": note,
        "random_state": ptfile.tensor("ByteStorage", random.Random(iteration).randbytes(100),
                                      (100,), 1),
        "placeholder": ptfile.tensor("FloatStorage", b"", (0,), 4)}
    if model.release < (0, 19, 3):
        for key in NOT_IN_OLD:
            del states[key]
        for rank in range(model.ep):
            ptfile.save(tag / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer": None})
    ptfile.save(tag / "mp_rank_00_model_states.pt", states)
    for layer in range(model.layers):
        for e in range(model.experts):
            module = model.module(layer, e)
            ptfile.save(tag / f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt",
                        {f"{module}.{suffix}":
                         model.weight(f"{module}.{suffix}", shape, version(module, "weight"))
                         for suffix, shape in model.expert.items()})
    for rank in range(model.ranks):
        write_shard(tag, model, rank, iteration, experts, version)


def slices(names, extents, first, last):
    """A rank's record of its partition: name -> (start, elements), of those that reach into it."""
    out, at = collections.OrderedDict(), 0
    for name, shape in zip(names, extents):
        count = 1
        for extent in shape:
            count *= extent
        start, end = max(at, first), min(at + count, last)
        if start < end:
            address = ptfile.find("deepspeed.utils.tensor_fragment", "fragment_address")()
            address.state = {"numel": end - start, "start": start - first}
            out[name] = address
        at += count
    return out


def write_shard(tag, model, rank, iteration, experts, version):
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
    step = array.array("f", [model.step(iteration)]).tobytes()
    prefix = "bf16_" if model.dtype == "bf16" else ""
    version_text = ".".join(map(str, model.release))
    inner = {
        "loss_scaler": None, "dynamic_loss_scale": False, "overflow": False, "clip_grad": 1.0,
        "base_optimizer_state": {
            "state": {g: {"step": ptfile.tensor("FloatStorage", step, (), 4),
                          "exp_avg": flat(parts["exp_avg"][g]),
                          "exp_avg_sq": flat(parts["exp_avg_sq"][g])} for g in (0, 1)},
            "param_groups": [{"lr": 0.1, "weight_decay": 0.1, "name": "all", "params": [0]},
                             {"lr": 0.1, "weight_decay": 0.1, "name": f"ep_size_{model.ep}",
                              "moe": True, "params": [1]}]},
        "single_partition_of_fp32_groups": [flat(part) for part in parts["fp32"]],
        "zero_stage": 2, "partition_count": [model.ranks, copies], "ds_version": version_text}
    if model.release < (0, 19, 3):
        dense, moe = (len(parts["exp_avg"][g]) // 4 for g in (0, 1))
        if model.release < (0, 14, 5):
            moe = moe * copies // model.ranks
        inner["param_slice_mappings"] = [
            slices(model.dense, model.dense.values(), rank * dense, (rank + 1) * dense),
            slices([f"{model.module(layer, e)}.{suffix}" for layer, e, suffix in experts],
                   [model.expert[suffix] for _, _, suffix in experts], place * moe,
                   (place + 1) * moe)]
    ptfile.save(tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {
        "optimizer_state_dict": inner, "ds_config": model.config, "ds_version": version_text})


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
