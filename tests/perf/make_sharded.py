#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint of real size with FSDP2 and AdamW on CPU ranks, for benchmarks.

    torchrun --nproc-per-node 4 make_sharded.py OUT --form dcp|files|hf [--hidden 1024] [--layers 21] [--vocab 32000]

A Llama of transformers in float32, one step. `dcp` is a folder of torch.distributed.checkpoint, `files` has a DTensor
file for each rank as in verl, `hf` are the weights alone as DCP writes them for Hugging Face, in pieces that are not
merged. The defaults give 335 million parameters and, with the moments, 4.0 GB.
"""
import argparse
import json
import os

import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(args):
    """A model and its optimizer after one step."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4,
                                      num_hidden_layers=args.layers, num_attention_heads=8, max_position_embeddings=64,
                                      tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    model = transformers.LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    tokens = torch.randint(0, args.vocab, (1, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_files(model, optimizer, folder):
    """As verl's checkpoint manager names them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save(model.state_dict(), os.path.join(folder, f"model_world_size_{world}_rank_{rank}.pt"))
    torch.save(optimizer.state_dict(), os.path.join(folder, f"optim_world_size_{world}_rank_{rank}.pt"))
    if rank == 0:
        with open(os.path.join(folder, "fsdp_config.json"), "w", encoding="utf-8") as file:
            json.dump({"FSDP_version": 2, "world_size": world}, file)
        beside = os.path.join(folder, "huggingface")
        model.config.save_pretrained(beside)
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"unknown": 0}, unk_token="unknown"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(beside)  # verl's merger wants one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--form", choices=("dcp", "files", "hf"), required=True)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.makedirs(args.out, exist_ok=True)
    model, optimizer = train(args)
    if args.form == "files":
        save_files(model, optimizer, args.out)
    elif args.form == "dcp":
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=args.out)
    else:
        dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(args.out, save_distributed=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
