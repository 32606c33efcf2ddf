# SPDX-License-Identifier: Apache-2.0
"""One engine process of the demo: ``python -m kvgrpc.cli.demo.engine first|second ...``. Prints its report as JSON.

All numbers that are compared come from equal step shapes: the prompt is computed in steps of one chunk, its rest in one
step, and each decoded token in a step of its own, with or without the cache. Products of other shapes may differ in the
last bits.
"""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import dataclass

import click
import torch

from kvgrpc.cli.demo.link import CacheLink
from kvgrpc.cli.demo.model import ModelShape, Transformer
from kvgrpc.cli.demo.paged import BlockPool, PagedSequence, PoolShape
from kvgrpc.cli.demo.report import DECODE_TOKENS, FirstReport, SecondReport, to_line

BLOCK_SIZE = 16
PROMPT_SEED = 7


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over prompt and decoding: the tokens, their logits, and the time from the start to the first token."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    first_token_s: float
    computed_tokens: int


class Engine:
    """Model, paged memory and prompt of one process. Blocks are chosen by chance, as in a busy pool."""

    def __init__(self, address: str, pool_name: str, prompt_tokens: int) -> None:
        shape = ModelShape()
        chance = torch.Generator().manual_seed(PROMPT_SEED)
        self.model = Transformer(shape)
        self.prompt = torch.randint(0, shape.vocabulary, (prompt_tokens,), generator=chance, dtype=torch.int32)
        self.blocks_needed = -(-(prompt_tokens + DECODE_TOKENS) // BLOCK_SIZE)
        num_blocks = 2 * self.blocks_needed + 8
        self.pool = BlockPool(
            pool_name, PoolShape(shape.layers, num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        )
        self.link = CacheLink(address, self.pool, self.model.revision())
        self._free = list(range(num_blocks))
        random.SystemRandom().shuffle(self._free)

    def new_sequence(self) -> PagedSequence:
        taken, self._free = self._free[: self.blocks_needed], self._free[self.blocks_needed :]
        return PagedSequence(self.pool, taken)

    def prefill(self, sequence: PagedSequence, start: int) -> torch.Tensor:
        """Computes the prompt from a chunk's start on; answers the logits after its last token."""
        step = self.link.chunk_tokens
        logits = torch.empty(0)
        for begin in range(start, len(self.prompt), step):
            logits = self.model.step(self.prompt[begin : begin + step], begin, sequence)
        return logits

    def generate(self, sequence: PagedSequence, cached_tokens: int, began_s: float) -> Run:
        """Prefill behind ``cached_tokens``, then greedy decoding."""
        before = self.model.computed_tokens
        logits = [self.prefill(sequence, cached_tokens)]
        tokens = [int(logits[-1].argmax())]
        first_token_s = time.perf_counter() - began_s
        while len(tokens) < DECODE_TOKENS:
            position = len(self.prompt) + len(tokens) - 1
            logits.append(self.model.step(torch.tensor(tokens[-1:]), position, sequence))
            tokens.append(int(logits[-1].argmax()))
        return Run(tuple(tokens), torch.stack(logits), first_token_s, self.model.computed_tokens - before)


def run_first(engine: Engine) -> FirstReport:
    sequence = engine.new_sequence()
    engine.prefill(sequence, 0)
    began_s = time.perf_counter()
    stored_tokens = engine.link.store(engine.prompt, sequence.block_ids)
    store_s = time.perf_counter() - began_s
    blocks = sequence.block_ids[: stored_tokens // BLOCK_SIZE]
    return FirstReport(
        process=os.getpid(),
        prompt_tokens=len(engine.prompt),
        stored_tokens=stored_tokens,
        stored_bytes=engine.pool.size_of(len(blocks)),
        store_s=store_s,
        digest=engine.pool.digest(blocks),
    )


def run_second(engine: Engine) -> SecondReport:
    sequence = engine.new_sequence()
    began_s = time.perf_counter()
    hit = engine.link.lookup(engine.prompt)
    looked_up_s = time.perf_counter()
    hit_tokens = engine.link.retrieve(hit, sequence.block_ids)
    retrieved_s = time.perf_counter()
    blocks = sequence.block_ids[: hit_tokens // BLOCK_SIZE]
    others = sorted(set(range(engine.pool.shape.num_blocks)) - set(blocks))
    digest, untouched = engine.pool.digest(blocks), engine.pool.untouched(others)
    inspection_s = time.perf_counter() - retrieved_s
    cached = engine.generate(sequence, hit_tokens, began_s + inspection_s)
    full = engine.generate(engine.new_sequence(), 0, time.perf_counter())
    return SecondReport(
        process=os.getpid(),
        prompt_tokens=len(engine.prompt),
        hit_tokens=hit_tokens,
        retrieved_bytes=engine.pool.size_of(len(blocks)),
        lookup_s=looked_up_s - began_s,
        retrieve_s=retrieved_s - looked_up_s,
        cached_first_token_s=cached.first_token_s,
        full_first_token_s=full.first_token_s,
        cached_computed_tokens=cached.computed_tokens,
        full_computed_tokens=full.computed_tokens,
        cached_tokens=cached.tokens,
        full_tokens=full.tokens,
        equal_logits=torch.equal(cached.logits.view(torch.int32), full.logits.view(torch.int32)),
        largest_difference=float((cached.logits - full.logits).abs().max()),
        other_blocks_untouched=untouched,
        digest=digest,
    )


@click.command()
@click.argument("part", type=click.Choice(["first", "second"]))
@click.option("--address", required=True)
@click.option("--pool-name", required=True)
@click.option("--prompt-tokens", required=True, type=int)
def main(part: str, address: str, pool_name: str, prompt_tokens: int) -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)  # one order of summation, whatever else the machine does
    engine = Engine(address, pool_name, prompt_tokens)
    try:
        click.echo(to_line(run_first(engine) if part == "first" else run_second(engine)))
    finally:
        engine.link.close()


if __name__ == "__main__":
    main()
