# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a tiny language model with transformers' Trainer and DeepSpeed, as users' scripts do."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it sets the environment up
import accelerate.utils.deepspeed
import peft
import torch
import transformers
import transformers.integrations.deepspeed

VOCABULARY, LENGTH = 61, 12
BATCH = 6  # samples of a step, over all ranks


class Sentences(torch.utils.data.Dataset):
    """Sequences that count up from somewhere, so that there is something to learn."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        tokens = (torch.arange(LENGTH) * (1 + index % 3) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Losses(transformers.TrainerCallback):
    """Notes the loss of every step."""

    def __init__(self):
        self.by_step = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.by_step[state.global_step] = logs["loss"]


def make_model(tied, lora):
    """The same weights in every run: those of a base model that was downloaded once."""
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied))
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def train(folder, case, steps, resume):
    """Collective. Trains up to step `steps`, from a checkpoint or from the start; the loss of each step done."""
    world = torch.distributed.get_world_size()
    config = {
        "zero_optimization": {"stage": case["zero"]},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto",
                                                  "torch_adam": True}},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    }
    arguments = transformers.TrainingArguments(
        str(folder), deepspeed=config, use_cpu=True, per_device_train_batch_size=BATCH // world, max_steps=steps,
        save_steps=case["save"], logging_steps=1, learning_rate=2e-2, warmup_steps=2, lr_scheduler_type="cosine",
        weight_decay=0.1, seed=3, data_seed=3, report_to=[], disable_tqdm=True)
    losses = Losses()
    trainer = transformers.Trainer(make_model(case["tied"], case["lora"]), arguments, train_dataset=Sentences(),
                                   callbacks=[losses])
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return losses.by_step


def run(world, folder, case, steps, resume=None):
    """train() on `world` ranks of this machine: {step: loss}."""
    losses = ranks.run(world, train, folder, case, steps, resume)
    return {int(step): loss for step, loss in losses.items()}
