# SPDX-License-Identifier: Apache-2.0
"""Which part of the KV data a process of a parallel engine holds, and who stores it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelStrategy:
    """Turns an engine's parallel sizes into KV ranks.

    ``world_size`` is that of one data-parallel replica: ``tp_size * pp_size``; replicas share data and each counts its
    ranks from 0. ``rank`` counts tensor-parallel ranks first: ``rank = pp_rank * tp_size + tp_rank``.
    ``num_kv_heads`` is the model's total; with more tensor-parallel ranks than heads, heads are replicated and the
    ranks of one head read one object. None: heads are split evenly. With MLA all ranks of a tensor-parallel group hold
    the same bytes, whatever ``num_kv_heads`` says.

    Raises ValueError when the sizes do not fit each other.
    """

    is_mla: bool
    world_size: int
    rank: int
    tp_size: int
    pp_size: int = 1
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.pp_size < 1:
            raise ValueError(f"tp_size {self.tp_size} and pp_size {self.pp_size} must be at least 1")
        if self.tp_size * self.pp_size != self.world_size:
            raise ValueError(
                f"tp_size {self.tp_size} x pp_size {self.pp_size} is not world_size {self.world_size}; "
                "world_size counts the ranks of one data-parallel replica"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in 0 .. {self.world_size - 1}")
        if self.num_kv_heads is not None and not self.is_mla:
            self._check_heads(self.num_kv_heads)

    def _check_heads(self, heads: int) -> None:
        if heads < 1:
            raise ValueError(f"num_kv_heads {heads} must be at least 1")
        if max(heads, self.tp_size) % min(heads, self.tp_size):
            raise ValueError(f"num_kv_heads {heads} and tp_size {self.tp_size}: one must divide the other")

    @property
    def tp_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.rank // self.tp_size

    @property
    def kv_tp_size(self) -> int:
        """KV ranks in a tensor-parallel group."""
        if self.is_mla:
            return 1
        if self.num_kv_heads is None:
            return self.tp_size
        return min(self.tp_size, self.num_kv_heads)

    @property
    def kv_world_size(self) -> int:
        """KV ranks that together hold one chunk."""
        return self.pp_size * self.kv_tp_size

    @property
    def readers_per_object(self) -> int:
        """Processes that read one object."""
        return self.tp_size // self.kv_tp_size

    @property
    def kv_rank(self) -> int:
        """Which object of a chunk this process reads."""
        return self.pp_rank * self.kv_tp_size + self.tp_rank // self.readers_per_object

    @property
    def is_kv_writer(self) -> bool:
        """The first reader of each object stores it."""
        return self.tp_rank % self.readers_per_object == 0
