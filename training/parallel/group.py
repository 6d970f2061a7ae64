"""The ranks of a run, with one rank as the special case in which every collective is nothing."""

from typing import Any

import torch
import torch.distributed as dist

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Group:
    """This process's place among the ranks, and the few collectives that training uses."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks, in place, in its own dtype."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_into(self, full: torch.Tensor, part: torch.Tensor) -> None:
        """full [size, n] = every rank's part [n]."""
        if self.size > 1:
            _gather(full.view(-1), part)
        else:
            full.view(-1).copy_(part)
