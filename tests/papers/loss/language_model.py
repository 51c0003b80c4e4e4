# SPDX-License-Identifier: Apache-2.0
"""A small mixture-of-experts language model on real text, trained by DeepSpeed on two ranks with expert parallelism.

The text is the Python source of the DeepSpeed release that scripts/peers pins, byte by byte. Every tenth file is
for validation. A step depends only on the seed, the iteration and the loaded state, so that a restored run can be
compared with the uninterrupted one iteration by iteration.
"""

import hashlib
import pathlib

import ranks  # first: it prepares DeepSpeed for forks
import deepspeed
import torch
import torch.nn.functional as functional
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

RANKS = 2
LAYERS, WIDTH, HEADS, EXPERTS = 4, 64, 4, 8
EXPERT_LAYERS = range(1, LAYERS, 2)  # every second layer has experts, as in DeepSpeed-MoE
SEQUENCE, BATCH, VOCABULARY = 128, 8, 256
CAPACITY = 1.25  # tokens of an expert, relative to even routing; further tokens are dropped
BALANCE = 0.01  # weight of the loss that balances the experts
RATE, WARMUP = 3e-3, 20
TRAINING_BYTES, VALIDATION_BYTES = 2 << 20, 256 << 10
CURVE_SEQUENCES, END_SEQUENCES = 32, 256  # validation sequences for a curve, and at the end of a run


def read_text():
    """Returns the bytes for training and for validation."""
    package = pathlib.Path(deepspeed.__file__).parent
    # pip writes this file; it describes the machine.
    files = sorted(path for path in package.rglob("*.py") if path.name != "git_version_info_installed.py")
    held_out = b"".join(path.read_bytes() for path in files[::10])[:VALIDATION_BYTES]
    rest = b"".join(path.read_bytes() for number, path in enumerate(files) if number % 10)[:TRAINING_BYTES]
    if (len(rest), len(held_out)) != (TRAINING_BYTES, VALIDATION_BYTES):
        raise RuntimeError(f"{package}: {len(rest)} bytes for training and {len(held_out)} for validation are too few")
    return rest, held_out


def describe():
    """Returns versions, sizes and the digest of the text, for the results file."""
    rest, held_out = read_text()
    return {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "ranks": RANKS, "layers": LAYERS,
            "moe_layers": len(EXPERT_LAYERS), "width": WIDTH, "experts": EXPERTS, "sequence": SEQUENCE, "batch": BATCH,
            "top_k": 1, "capacity_factor": CAPACITY, "learning_rate": RATE, "zero": 2, "ep": RANKS,
            "text": "Python files of the deepspeed package", "training_bytes": len(rest),
            "validation_bytes": len(held_out), "text_sha256": hashlib.sha256(rest + held_out).hexdigest()}


class Block(nn.Module):
    """Causal attention, and a feed-forward network that is dense or has experts."""

    def __init__(self, index):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.moe = self.dense = None
        if index in EXPERT_LAYERS:
            self.moe = MoE(WIDTH, expert=feed, num_experts=EXPERTS, ep_size=RANKS, k=1, capacity_factor=CAPACITY,
                           eval_capacity_factor=2.0, use_rts=False)
        else:
            self.dense = feed

    def forward(self, x):
        """Returns the activations, the balance loss and the token counts of the experts."""
        shape = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        if self.moe is None:
            return x + self.dense(self.norm2(x)), 0.0, None
        y, balance, counts = self.moe(self.norm2(x))
        return x + y, balance, counts


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block(index) for index in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, samples):
        """Returns the loss to train with, the cross-entropy per byte, and [moe layer][expert] token counts."""
        x = self.embed(samples[:, :-1]) + self.positions.weight
        balance, counts = 0.0, []
        for block in self.blocks:
            x, more, tokens = block(x)
            balance = balance + more
            if tokens is not None:
                counts.append(tokens.detach().to(torch.int64))
        loss = functional.cross_entropy(self.score(self.norm(x)).flatten(0, 1), samples[:, 1:].flatten())
        return loss + BALANCE * balance, loss.detach().double(), torch.stack(counts)


def make_engine(seed, iterations):
    """Collective. Returns the DeepSpeed engine of a run of so many iterations: ZeRO stage 2, float32."""
    torch.manual_seed(seed)
    model = LanguageModel()
    groups = split_params_into_different_moe_groups_for_optimizer([{"params": list(model.parameters()), "name": "all"}])
    config = {
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": RATE,
                                                          "warmup_num_steps": WARMUP, "total_num_steps": iterations}},
    }
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def samples_at(text, places):
    """Returns this rank's share of the samples that start at these places of the text."""
    mine = places.chunk(RANKS)[torch.distributed.get_rank()]
    return torch.stack([text[place:place + SEQUENCE + 1] for place in mine.tolist()]).long()


def validation_loss(engine, text, sequences):
    """Collective. Returns the mean cross-entropy per byte on evenly spaced samples of the validation text."""
    places = torch.arange(sequences) * ((len(text) - SEQUENCE - 1) // sequences)
    engine.eval()
    total = torch.zeros((), dtype=torch.float64)
    batches = places.split(4 * BATCH)
    with torch.no_grad():
        for batch in batches:
            total += engine(samples_at(text, batch))[1]
    engine.train()
    torch.distributed.all_reduce(total)
    return float(total) / (RANKS * len(batches))


def train(seed, load, last, iterations, every, checkpoints, folder):
    """Collective; for ranks.run. Trains up to iteration `last` of a run of `iterations`, from the checkpoint in folder
    `load` or from the beginning. Evaluates every so many iterations and where it starts, and lets DeepSpeed write
    checkpoints of the listed iterations into a folder.
    \\returns start; losses, tokens ([moe layer][expert]) and validation by iteration; end: a larger validation"""
    rest, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in read_text())
    engine = make_engine(seed, iterations)
    if load and engine.load_checkpoint(load)[0] is None:
        raise RuntimeError(f"DeepSpeed finds no checkpoint in {load}")
    start = engine.global_steps
    found = {"start": start, "losses": {}, "tokens": {},
             "validation": {start: validation_loss(engine, held_out, CURVE_SEQUENCES)}}
    for iteration in range(start + 1, last + 1):
        draw = torch.Generator().manual_seed((seed << 32) + iteration)
        samples = samples_at(rest, torch.randint(len(rest) - SEQUENCE, (BATCH,), generator=draw))
        loss, entropy, tokens = engine(samples)
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(entropy)
        torch.distributed.all_reduce(tokens)
        found["losses"][iteration] = float(entropy) / RANKS
        found["tokens"][iteration] = tokens.tolist()
        if iteration % every == 0:
            found["validation"][iteration] = validation_loss(engine, held_out, CURVE_SEQUENCES)
        if iteration in checkpoints:
            engine.save_checkpoint(folder)
    found["end"] = validation_loss(engine, held_out, END_SEQUENCES) if last == iterations else None
    return found


def run_training(*arguments):
    """Runs train() on its ranks. \\returns its result, with numbers as keys"""
    found = ranks.run(RANKS, train, *arguments)
    for name in ("losses", "tokens", "validation"):
        found[name] = {int(iteration): value for iteration, value in found[name].items()}
    return found
