# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the program that no server needs to be asked about."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from kvgrpc import api
from kvgrpc.core.types import TokenRange


def check_request_id(request_id: object) -> None:
    """TypeError for a number, say, which would be no other request than its text."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id is {type(request_id).__name__}; send a str")


def check_content(content: object) -> None:
    """TypeError for what no server could be asked about."""
    if not isinstance(content, api.Content):
        raise TypeError(f"content is {type(content).__name__}; send Tokens or Hashes")


def check_blocks(blocks: Sequence[object]) -> None:
    """TypeError for ids that are not one sequence a KV group."""
    if any(isinstance(ids, Integral) for ids in blocks):
        raise TypeError("blocks is one list of block ids for each KV group: [[3, 1, 2]], not [3, 1, 2]")


def check_range(tokens: TokenRange | None) -> None:
    """TypeError for what is no range; ValueError for a reversed one: no result could be about its chunks."""
    if tokens is None:
        return
    if not isinstance(tokens, TokenRange):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"range is {type(tokens).__name__}; send a TokenRange")
    if tokens.end < tokens.start:
        raise ValueError(f"the range [{tokens.start}, {tokens.end}) is reversed")
