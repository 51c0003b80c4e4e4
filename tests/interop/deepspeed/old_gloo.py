"""What Gloo of PyTorch before 2.3 lacks and ZeRO needs, made of what it has: to run the tests with older releases."""

import torch
import torch.distributed as dist


class Done:
    """The handle of an operation that has ended."""

    def wait(self):
        return True


def all_gather_into_tensor(output, own, group=None, async_op=False):
    return dist.all_gather(list(output.view(-1).chunk(dist.get_world_size(group))), own.reshape(-1), group, async_op)


def reduce_scatter_tensor(output, parts, op=dist.ReduceOp.SUM, group=None, async_op=False):
    whole = parts.clone()
    dist.all_reduce(whole, op, group)
    output.view(-1).copy_(whole.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)])
    return Done() if async_op else None


def complete():
    """Adds the missing operations, where they are missing."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3):
        dist.all_gather_into_tensor = all_gather_into_tensor
        dist.reduce_scatter_tensor = reduce_scatter_tensor
