"""The very small language model of tests/data/demo, the checkpoint that scripts/demo converts.

It is small, but it has what makes checkpoints hard to convert: ZeRO-2 partitions that cut
through parameters, bf16 weights with fp32 masters, two parameter groups with settings of their own,
an output layer tied to the embedding, a frozen table, a buffer, a scheduler and client state. Its
sizes are odd, so that nothing divides evenly.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

VOCABULARY = 47
WIDTH = 18
HEADS = 3
LAYERS = 2
CONTEXT = 9
BATCH_PER_RANK = 4
STEPS = 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.narrow = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.query_key_value(self.norm_attention(x))
        heads = heads.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(functional.gelu(self.widen(self.norm_mlp(x))))


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) / WIDTH, requires_grad=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm_out = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.register_buffer("token_counts", torch.zeros(VOCABULARY, dtype=torch.float32))

    def forward(self, tokens):
        """The loss of predicting each token from those before it."""
        self.token_counts += torch.bincount(tokens.flatten(), minlength=VOCABULARY)
        x = self.embedding(tokens[:, :-1]) + self.position[: tokens.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm_out(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def parameter_groups(model):
    """Matrices decay, vectors do not and learn faster."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "name": "matrices"},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3,
         "name": "vectors"},
    ]


def config():
    return {
        "train_micro_batch_size_per_gpu": BATCH_PER_RANK,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 20}},
    }


def tokens_of(step, rank):
    """Counting upwards from anywhere: easy to learn, the same in every run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    first = torch.randint(0, VOCABULARY, (BATCH_PER_RANK, 1), generator=generator)
    return (first + torch.arange(CONTEXT + 1)) % VOCABULARY


def make(folder):
    """Collective. Trains a few steps and saves the checkpoint."""
    torch.manual_seed(20)
    model = TinyModel()
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=2e-3, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config())
    for step in range(STEPS):
        loss = engine(tokens_of(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
    seen = STEPS * dist.get_world_size() * BATCH_PER_RANK
    engine.save_checkpoint(str(folder), client_state={"run": "tiny demo", "sequences_seen": seen})
