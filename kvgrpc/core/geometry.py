# SPDX-License-Identifier: Apache-2.0
"""What the core knows of an engine's layout: blocks, bytes, and which chunks a hit needs of which layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NULL_BLOCK = 0xFFFFFFFF
"""Stands in a list of block ids for a block that the engine does not have."""
MAX_GROUPS = 64
MAX_NEEDS = 8
"""Bound of how many different things groups may need of a prefix: each is looked up for each chunk."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a hit needs of some layers: everything (``window`` 0), the chunks that hold its last ``window`` tokens, or,
    if ``aligned``, those since the last multiple of ``window`` that lies before its last token."""

    window: int = 0
    aligned: bool = False

    def first(self, chunks: int, chunk_tokens: int) -> int:
        """The first chunk that a hit of so many chunks needs."""
        if not self.window:
            return 0
        end = chunks * chunk_tokens
        start = (end - 1) // self.window * self.window if self.aligned else end - self.window
        return max(0, start) // chunk_tokens

    def tail(self, block_size: int, chunk_tokens: int) -> int:
        """How many blocks of a chunk can ever be needed: its last ones."""
        blocks = chunk_tokens // block_size
        if not self.window or (self.aligned and chunk_tokens % self.window):
            return blocks
        return min(blocks, -(-self.window // block_size))


ALL = Need()


def by_need(needs: Sequence[Need]) -> dict[Need, tuple[int, ...]]:
    """The groups of each need, that of everything first, then as they come: one part of a chunk each."""
    in_order = sorted(dict.fromkeys(needs), key=lambda need: need != ALL)
    return {need: tuple(at for at, one in enumerate(needs) if one == need) for need in in_order}


def bits_of(groups: Sequence[int]) -> int:
    """Bit g stands for group g."""
    return sum(1 << group for group in groups)


def needs_of(stored_form: str, chunk_tokens: int) -> list[Need]:
    """What each group of a stored form (docs/protocol.md) needs. ValueError when that does not say so."""
    needs: list[Need] = []
    for form in stored_form.split("+"):
        match form.split(":"):
            case [("opaque" | "token-major"), _, *_]:
                needs.append(ALL)
            case [("sliding-window" | "chunked-local") as kind, window, *_]:
                needs.append(Need(_count(window, (1 << 32) - 1), aligned=kind == "chunked-local"))
            case ["recurrent", "opaque", *_, block_size]:
                needs.append(Need(_count(block_size, chunk_tokens)))
            case _:
                raise ValueError(form)
    if len(needs) > MAX_GROUPS or len(set(needs)) > MAX_NEEDS:
        raise ValueError(f"{len(needs)} groups with {len(set(needs))} needs")
    return needs


def _count(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= most):
        raise ValueError(text)
    return int(text)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Paging of one KV group: ``block_bytes`` is what one block of all its layers and planes holds.

    ``order`` says in which order an object holds its runs: objects of equal order and length mean the same bytes.
    """

    block_size: int
    num_blocks: int
    block_bytes: int
    need: Need = ALL
    order: str = ""


class PartForm(NamedTuple):
    """What all must agree on who share the objects of a part: what a hit needs of it, their length, and the order of
    their runs."""

    need: Need
    object_bytes: int
    order: str


class ObjectForm(NamedTuple):
    """What one object of each chunk is, to whoever has it as bytes: a bit for each of its ``groups`` (0: all, where
    each needs everything), its length, and the order of its runs."""

    groups: int
    object_bytes: int
    order: str


@dataclass(frozen=True, slots=True)
class Part:
    """The groups of equal need, whose bytes of a chunk are one object: the chunk's last ``blocks[i]`` blocks of group
    ``groups[i]``, one group after the other."""

    number: int
    need: Need
    groups: tuple[int, ...]
    blocks: tuple[int, ...]
    object_bytes: int
    order: str

    @property
    def form(self) -> PartForm:
        """Equal for all that may share objects of it."""
        return PartForm(self.need, self.object_bytes, self.order)

    @property
    def group_bits(self) -> int:
        """Its groups, as ``bits_of``."""
        return bits_of(self.groups)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the core knows of a layout: enough to count blocks and bytes, nothing of strides."""

    groups: tuple[GroupGeometry, ...]

    def parts(self, chunk_tokens: int) -> tuple[Part, ...]:
        """One for each need."""
        parts: list[Part] = []
        for need, places in by_need([group.need for group in self.groups]).items():
            groups = [self.groups[at] for at in places]
            blocks = tuple(need.tail(group.block_size, chunk_tokens) for group in groups)
            size = sum(count * group.block_bytes for count, group in zip(blocks, groups, strict=True))
            parts.append(
                Part(len(parts), need, places, blocks, size, "+".join(filter(None, (group.order for group in groups))))
            )
        return tuple(parts)

    def object_bytes(self, chunk_tokens: int) -> int:
        """Of all parts of a chunk."""
        return sum(part.object_bytes for part in self.parts(chunk_tokens))

    @property
    def block_size(self) -> int:
        """Alignment of token ranges: the largest block size of the groups."""
        return max(g.block_size for g in self.groups)
