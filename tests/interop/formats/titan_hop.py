# SPDX-License-Identifier: Apache-2.0
"""Trains a llama3 of torchtitan that computes what a small Llama of transformers does, on the batches of hops.py, from a
folder that torchtitan's checkpoint manager loads. torchtitan wants an accelerator; here it gets the CPU as one.

    titan_hop.py '{"ranks": 3, "source": ..., "output": ..., "steps": [4, 6], ...}'

Prints the losses as JSON in its last line. Runs in the environment of scripts/peers that has torchtitan.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_COMPILE_DISABLE="1")
import hop_ranks
import torch
import torch._utils
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"
import torchtitan.models.llama3 as llama3
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_utils
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

# The attention that has gradients on a CPU.
ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()


def make_model(job, dims, parallelism):
    width, vocabulary = job["hidden"], job["vocabulary"]
    layers = llama3._build_llama3_layers(
        fuse_qkv=job["fused"], n_layers=job["layers"], dim=width, n_heads=job["heads"], n_kv_heads=job["kv_heads"],
        hidden_dim=job["inner"], attn_backend="flex",
        rope=ComplexRoPE.Config(dim=width // job["heads"], max_seq_len=job["length"], theta=job["theta"]))
    config = llama3.Llama3Model.Config(
        dim=width, vocab_size=vocabulary, layers=layers, norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)))
    set_llama3_sharding_config(config, enable_sp=False)
    titan_utils.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32",
                              local_batch_size=job["batch"] // job["ranks"], seq_len=job["length"], disable_cuda_graphs=True)
    model = llama3.parallelize_llama(model, parallel_dims=dims, training=training, parallelism=parallelism,
                                     compile_config=CompileConfig(), ac_config=None, dump_folder="")
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a reduction by factors
        if isinstance(module, RMSNorm):
            module.eps = job["epsilon"]
    return model.train()


def make_optimizer(job, model):
    common = {"lr": job["rate"], "betas": tuple(job["betas"]), "eps": job["adam_epsilon"]}
    groups = [ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**common, "weight_decay": decay})
              for pattern, decay in ((r"norm", 0.0), (r".*", job["decay"]))]
    return OptimizersContainer.Config(implementation="for-loop", param_groups=groups).build(model_parts=[model])


class Progress:
    """The state that torchtitan's trainer keeps as train_state."""

    step = ntokens_seen = 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state):
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Batches(torch.utils.data.IterableDataset):
    """Not used: batches come with the job. torchtitan wants one to save."""

    def __iter__(self):
        return iter(())


def train(job):
    parallelism = ParallelismConfig(data_parallel_shard_degree=job["ranks"], enable_sequence_parallel=False,
                                    spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, job["ranks"])
    torch.manual_seed(105)
    model = make_model(job, dims, parallelism)
    optimizer = make_optimizer(job, model)
    schedule = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizer, training_steps=1_000_000)
    progress, rank = Progress(), dist.get_rank()

    def manager(folder):
        return CheckpointManager.Config(enable=True, folder=folder, keep_latest_k=0, interval=1, exclude_from_loading=["dataloader"]).build(
            dataloader=ParallelAwareDataloader(Batches(), rank, job["ranks"], batch_size=1), model_parts=[model],
            optimizers=optimizer, lr_schedulers=schedule, states={"train_state": progress}, sd_adapter=None, base_folder="")

    first, last = job["steps"]
    if not manager(job["source"]).load(first) or progress.step != first:
        raise RuntimeError(f"torchtitan did not load step {first} but {progress.step}")
    losses = []
    for batch in job["batches"]:
        tokens = torch.tensor(batch).chunk(job["ranks"])[rank]
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss / job["ranks"]).backward()  # torchtitan has FSDP add gradients up
        optimizer.step()
        progress.step += 1
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / job["ranks"])
    if job.get("output"):
        manager(job["output"]).save(last)
    return losses


if __name__ == "__main__":
    hop_ranks.main(train)
