"""GPUs that are not there: a process sees those that Ray made visible to it, or all of the machine,
and what it moves to a GPU stays on the CPU and is noted."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

NOTES = "NOTES_OF_GPUS"  # the variable that names the file of notes


def visible() -> list[str]:
    """The numbers of the GPUs that this process sees."""
    return [n for n in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",") if n]


def install() -> None:
    """In a process of the cluster, before it does anything."""
    move = nn.Module.to

    def to(self: nn.Module, device: Any, *more: Any, **options: Any) -> nn.Module:
        if not str(device).startswith("cuda"):
            return move(self, device, *more, **options)
        with Path(os.environ[NOTES]).open("a") as notes:
            notes.write(f"{os.getpid()} {','.join(visible())}\n")
        return self

    nn.Module.to = to
    torch.cuda.is_available = lambda: bool(visible())
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device: None


def touched(notes: Path) -> dict[int, str]:
    """The GPUs that each process saw when it moved something to one. Empties `notes`."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return {int(pid): seen for pid, _, seen in (line.partition(" ") for line in lines)}
