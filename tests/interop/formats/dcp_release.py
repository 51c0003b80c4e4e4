# SPDX-License-Identifier: Apache-2.0
"""Saves or loads a torch.distributed.checkpoint folder with the PyTorch release that runs this, on several ranks.

    dcp_release.py '{"ranks": N, "do": "save" | "load", "folder": ...}'

Returns the release, and the differences from the tensors that were saved.
"""

import torch
import torch.distributed.checkpoint as dcp

import hop_ranks

try:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
except ImportError:  # before 2.5
    from torch.distributed._tensor import DeviceMesh, Shard, distribute_tensor

CUT = {"model.deep.weight": (7, 5), "model.cube.weight": (6, 4, 3), "model.few.weight": (3, 2), "optim.state.deep.weight.exp_avg": (7, 5)}
WHOLE = {"model.half": torch.bfloat16, "model.count": torch.int64, "optim.state.deep.weight.step": torch.float32}
NOTE = "not a tensor"


def tensors():
    numbers = torch.Generator().manual_seed(3)
    cut = {name: torch.randn(shape, generator=numbers) for name, shape in CUT.items()}
    return cut, {name: torch.randint(100, (9,), generator=numbers).to(dtype) for name, dtype in WHOLE.items()}


def state(cut, whole, world):
    mesh = DeviceMesh("cpu", list(range(world)))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in cut.items()} | whole


def work(job):
    cut, whole = tensors()
    if job["do"] == "save":
        given = state(cut, whole, job["ranks"]) | {"note": NOTE}
        if hasattr(dcp, "save"):
            dcp.save(given, checkpoint_id=job["folder"])
        else:  # before 2.2
            dcp.save_state_dict(given, dcp.FileSystemWriter(job["folder"]))
        return torch.__version__, []
    empty = [{name: torch.zeros_like(tensor) for name, tensor in some.items()} for some in (cut, whole)]
    found = state(*empty, job["ranks"]) | {"note": ""}
    if hasattr(dcp, "load"):
        dcp.load(found, checkpoint_id=job["folder"])
    else:
        dcp.load_state_dict(found, dcp.FileSystemReader(job["folder"]))
    wanted = state(cut, whole, job["ranks"])
    local = {name: [getattr(one[name], "_local_tensor", one[name]) for one in (found, wanted)] for name in wanted}
    wrong = [name for name, (one, other) in local.items() if not torch.equal(one, other)]
    return torch.__version__, wrong + (["note"] if found["note"] != NOTE else [])


if __name__ == "__main__":
    hop_ranks.main(work)
