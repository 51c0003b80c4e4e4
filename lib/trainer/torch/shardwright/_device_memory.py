# SPDX-License-Identifier: Apache-2.0
"""Copies tensors from devices to host memory. PyTorch copies the bytes, so every device that PyTorch supports works."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK = 16 << 20  # bytes of one copy from a device


def _host_memory(size: int) -> torch.Tensor:
    """Allocates host memory that the accelerator can access directly (pinned), if this process has an accelerator."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=torch.accelerator.is_available())


def wait_for_devices(devices: set[torch.device]) -> None:
    """Waits until the devices have completed all queued work, including copies to host memory."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def staging_for(devices: set[torch.device], size: int) -> list[torch.Tensor]:
    """Allocates host memory to stage data for tensors on these devices. Returns an empty list if all are CPUs."""
    return [_host_memory(size)] if any(device.type != "cpu" for device in devices) else []


def host_bytes(tensor: torch.Tensor, first: int, last: int) -> Iterator[memoryview]:
    """Yields the bytes [first, last) of a contiguous tensor in host memory, in chunks. Each chunk is valid until the next one is
    requested. The next chunk is copied from the device while the caller uses the current one."""
    if first == last:
        return
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if tensor.is_cpu:
        yield memoryview(flat.numpy())[first:last]
        return
    stages = [_host_memory(min(CHUNK, last - first)) for _ in range(2 if last - first > CHUNK else 1)]
    coming: list[tuple[torch.Tensor, torch.Event]] = []
    for number, begin in enumerate(range(first, last, CHUNK)):
        stage = stages[number % 2][:min(CHUNK, last - begin)]
        stage.copy_(flat[begin:begin + len(stage)], non_blocking=True)
        event = torch.Event(tensor.device)
        event.record(torch.accelerator.current_stream(tensor.device))
        coming.append((stage, event))
        if len(coming) == 2:
            yield _completed(*coming.pop(0))
    yield _completed(*coming.pop())


def _completed(stage: torch.Tensor, event: torch.Event) -> memoryview:
    """Waits for a copy and returns its bytes."""
    event.synchronize()
    return memoryview(stage.numpy())
