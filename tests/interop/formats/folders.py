# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama with fully_shard and saves it where trainers do.

    fork_ranks.py RANKS MODULES folders.py save FOLDER
    fork_ranks.py RANKS MODULES folders.py load CHECKPOINT FOLDER

As verl in FOLDER/actor: DTensor files for each rank, configuration and tokenizer in huggingface/. As slime in
FOLDER/run: DCP folders for the model, the optimizer and the scheduler, and a pointer to them. FOLDER/whole.pt has the
model as rank 0 has gathered it, FOLDER/losses.json the losses of the next steps; `load` compares a converted folder of
slime with both.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 2
CONFIG = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 41, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 32}
TOKENS = (torch.arange(24) % 61).reshape(2, 12)


class Part:
    """The object that slime passes to DCP: it makes and takes the state of a part."""

    def __init__(self, key, take, give):
        self.key, self.take, self.give = key, take, give

    def state_dict(self):
        return {self.key: self.take()}

    def load_state_dict(self, state):
        self.give(state[self.key])


def parts_of(model, optimizer, scheduler):
    """folder -> the state that is saved in it"""
    return {
        "model": {"model_state": Part("model", lambda: get_state_dict(model, [])[0], lambda state: set_state_dict(
            model, [], model_state_dict=state, optim_state_dict=None))},
        "optimizer": {"optim_state": Part("optim", lambda: get_state_dict(model, optimizer)[1], lambda state: set_state_dict(
            model, optimizer, model_state_dict=None, optim_state_dict=state))},
        "lr_scheduler": {"lr_scheduler_state": Part("lr_scheduler", scheduler.state_dict, scheduler.load_state_dict)},
    }


def make(seed):
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)


def train(model, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss))
    return losses


def save_verl(folder, model, optimizer, scheduler):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    items = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": {"lr_scheduler": scheduler.state_dict()}}
    for item, value in items.items():
        torch.save(value, folder / f"{item}_world_size_{ranks}_rank_{rank}.pt")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
        model.config.save_pretrained(folder / "huggingface")
        transformers.GenerationConfig(max_new_tokens=5).save_pretrained(folder / "huggingface")
        from tokenizers import Tokenizer, models
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "huggingface")


def save_slime(folder, *trained):
    step = folder / f"iter_{STEPS:07d}"
    for name, state in parts_of(*trained).items():
        dcp.save(state, checkpoint_id=str(step / name))
    if dist.get_rank() == 0:
        torch.save({"torch": torch.get_rng_state()}, step / "rng.pt")
        (step / "meta.json").write_text(json.dumps({"iteration": STEPS}))
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def load_slime(folder, expected):
    """Loads a converted checkpoint into another model, and continues training; the loaded values, next to the saved
    ones."""
    trained = make(seed=5)
    for name, state in parts_of(*trained).items():
        dcp.load(state, checkpoint_id=str(folder / name))
    whole = get_model_state_dict(trained[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    losses = train(*trained, STEPS)
    if dist.get_rank() == 0:
        saved = torch.load(expected / "whole.pt")
        made = json.loads((expected / "losses.json").read_text())
        wrong = [name for name, tensor in saved.items() if not torch.equal(tensor, whole[name])]
        if wrong or max(abs(a - b) for a, b in zip(losses, made)) > 1e-5:
            raise AssertionError(f"{wrong}, losses {losses} for {made}")


def main():
    how, folder, *expected = sys.argv[1:]
    folder = pathlib.Path(folder)
    dist.init_process_group("gloo")
    if how == "load":
        load_slime(folder, pathlib.Path(expected[0]))
        return
    trained = make(seed=1)
    train(*trained, STEPS)
    for name, save in (("actor", save_verl), ("run", save_slime)):
        (folder / name).mkdir(exist_ok=True)
        dist.barrier()
        save(folder / name, *trained)
    whole = get_model_state_dict(trained[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    losses = train(*trained, STEPS)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
