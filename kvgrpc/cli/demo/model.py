# SPDX-License-Identifier: Apache-2.0
"""A small Llama-style transformer with random weights: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Attention reads the KV of a paged sequence by gathering its blocks. Weights follow from the seed alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from dataclasses import dataclass

import torch

from kvgrpc.cli.demo.paged import PagedSequence


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model. ``gain`` widens the weights, so that greedy output varies instead of repeating one token."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 768
    gain: float = 2.0
    seed: int = 20260101


class Transformer:
    """The model. ``computed_tokens`` counts the tokens that went through it, ever."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.computed_tokens = 0
        chance = torch.Generator().manual_seed(shape.seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=chance) * (shape.gain / math.sqrt(rows))

        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._embedding = torch.randn(shape.vocabulary, shape.hidden, generator=chance)
        self._layers = [
            {
                "query": weight(shape.hidden, width),
                "key": weight(shape.hidden, kv_width),
                "value": weight(shape.hidden, kv_width),
                "output": weight(width, shape.hidden),
                "gate": weight(shape.hidden, shape.feed_forward),
                "up": weight(shape.hidden, shape.feed_forward),
                "down": weight(shape.feed_forward, shape.hidden),
            }
            for _ in range(shape.layers)
        ]
        self._vocabulary = weight(shape.hidden, shape.vocabulary)

    def revision(self) -> str:
        """Checksum of the weights: what the cache knows this model's version by."""
        found = hashlib.sha256()
        for tensor in (self._embedding, *(t for layer in self._layers for t in layer.values()), self._vocabulary):
            size_bytes = tensor.numel() * tensor.element_size()
            found.update((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr()))  # no numpy needed
        return found.hexdigest()

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, start: int, sequence: PagedSequence) -> torch.Tensor:
        """Runs ``tokens`` through the model at positions from ``start`` on; earlier KV comes from the sequence.

        Returns the logits after the last token, ``[vocabulary]``.
        """
        self.computed_tokens += tokens.shape[0]
        hidden = self._embedding[tokens]
        rotation = self._rotation(start, tokens.shape[0])
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attention(number, _normalise(hidden), start, rotation, sequence)
            inner = _normalise(hidden)
            hidden = hidden + (torch.nn.functional.silu(inner @ layer["gate"]) * (inner @ layer["up"])) @ layer["down"]
        return _normalise(hidden[-1:])[0] @ self._vocabulary

    def _attention(
        self, number: int, hidden: torch.Tensor, start: int, rotation: torch.Tensor, sequence: PagedSequence
    ) -> torch.Tensor:
        shape, layer, count = self.shape, self._layers[number], hidden.shape[0]
        queries = _rotate((hidden @ layer["query"]).view(count, shape.heads, shape.head_dim), rotation)
        keys = _rotate((hidden @ layer["key"]).view(count, shape.kv_heads, shape.head_dim), rotation)
        values = (hidden @ layer["value"]).view(count, shape.kv_heads, shape.head_dim)
        sequence.write(number, start, keys, values)
        keys, values = sequence.gather(number, start + count)

        group = shape.heads // shape.kv_heads
        queries = queries.view(count, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
        scores = queries @ keys.permute(1, 2, 0).unsqueeze(1) / math.sqrt(shape.head_dim)
        visible = torch.arange(start + count) <= torch.arange(start, start + count).unsqueeze(1)
        shares = scores.masked_fill(~visible, -math.inf).softmax(-1)
        mixed = shares @ values.permute(1, 0, 2).unsqueeze(1)
        return mixed.permute(2, 0, 1, 3).reshape(count, shape.heads * shape.head_dim) @ layer["output"]

    def _rotation(self, start: int, count: int) -> torch.Tensor:
        """Cosines and sines of the rotary angles, ``[2, tokens, 1, head_dim / 2]``."""
        frequencies = 10_000.0 ** (-torch.arange(0, self.shape.head_dim, 2) / self.shape.head_dim)
        angles = torch.arange(start, start + count).unsqueeze(1) * frequencies
        return torch.stack((angles.cos(), angles.sin())).unsqueeze(2)


def _normalise(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(vectors: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    first, second = vectors.chunk(2, -1)
    cosine, sine = rotation[0], rotation[1]
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)
