"""Tensors on devices: PyTorch copies their bytes, whatever device it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK = 16 << 20  # bytes that are copied off a device at once


def _host_memory(size: int) -> torch.Tensor:
    """Bytes that the accelerator of this process copies from and to without a detour."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=torch.accelerator.is_available())


def wait_for_devices(devices: set[torch.device]) -> None:
    """Until they have done all that was queued, also what copies to memory of the CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def staging_for(devices: set[torch.device], size: int) -> list[torch.Tensor]:
    """Memory for what goes to tensors on these devices, none where all are on the CPU."""
    return [_host_memory(size)] if any(device.type != "cpu" for device in devices) else []


def near(tensor: torch.Tensor, first: int, last: int) -> Iterator[memoryview]:
    """The bytes first..last of a contiguous tensor, in memory of this process, one stretch after the other; each may be looked
    at until the next one is asked for. While it is, the next one comes off the device."""
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
            yield _arrived(*coming.pop(0))
    yield _arrived(*coming.pop())


def _arrived(stage: torch.Tensor, event: torch.Event) -> memoryview:
    event.synchronize()
    return memoryview(stage.numpy())
