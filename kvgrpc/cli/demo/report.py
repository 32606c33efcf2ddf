# SPDX-License-Identifier: Apache-2.0
"""What the demo's engine processes report, and what must hold between the two reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from pydantic import TypeAdapter

DECODE_TOKENS = 32
DISTINCT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class FirstReport:
    """The process that computed and stored. Times are seconds; ``digest`` covers the stored tokens' blocks."""

    process: int
    prompt_tokens: int
    stored_tokens: int
    stored_bytes: int
    store_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class SecondReport:
    """The process that retrieved, decoded, and then computed everything itself to compare."""

    process: int
    prompt_tokens: int
    hit_tokens: int
    retrieved_bytes: int
    lookup_s: float
    retrieve_s: float
    cached_first_token_s: float
    full_first_token_s: float
    cached_computed_tokens: int
    full_computed_tokens: int
    cached_tokens: tuple[int, ...]
    full_tokens: tuple[int, ...]
    equal_logits: bool
    largest_difference: float
    other_blocks_untouched: bool
    digest: str


Report = TypeVar("Report", FirstReport, SecondReport)


def to_line(report: FirstReport | SecondReport) -> str:
    """One line of JSON."""
    return json.dumps(asdict(report))


def from_line(kind: type[Report], line: str) -> Report:
    """The report in a line that ``to_line`` made; ValueError when it is none."""
    return TypeAdapter(kind).validate_json(line)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, in words, and whether it does."""

    text: str
    holds: bool


def checks(first: FirstReport, second: SecondReport, chunk_tokens: int) -> tuple[Check, ...]:
    """Everything that makes the demo a proof. ``chunk_tokens`` is the server's."""
    whole = first.prompt_tokens // chunk_tokens * chunk_tokens
    decoded = DECODE_TOKENS - 1  # the first of them comes with the prompt
    distinct = len(set(second.cached_tokens))
    return (
        Check("the two engines are different processes", first.process != second.process),
        Check(
            f"every whole chunk of the prompt was stored ({first.stored_tokens} tokens)", first.stored_tokens == whole
        ),
        Check(f"all of them were found again ({second.hit_tokens} tokens)", second.hit_tokens == whole),
        Check(f"the retrieved bytes are the stored ones (sha256 {first.digest[:16]})", first.digest == second.digest),
        Check("blocks that were not asked for are untouched (still 0xA5)", second.other_blocks_untouched),
        Check(
            f"hit tokens were not computed ({second.cached_computed_tokens} computed, "
            f"{second.full_computed_tokens} without the cache)",
            second.cached_computed_tokens == second.prompt_tokens - second.hit_tokens + decoded
            and second.full_computed_tokens == second.prompt_tokens + decoded,
        ),
        Check(
            f"{DECODE_TOKENS} logit vectors are equal bit for bit (largest difference {second.largest_difference:g})",
            second.equal_logits,
        ),
        Check(
            f"the {DECODE_TOKENS} tokens are equal",
            second.cached_tokens == second.full_tokens and len(second.cached_tokens) == DECODE_TOKENS,
        ),
        Check(
            f"the tokens vary ({distinct} different ones, at least {DISTINCT_TOKENS} wanted)",
            distinct >= DISTINCT_TOKENS,
        ),
    )
