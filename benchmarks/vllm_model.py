# SPDX-License-Identifier: Apache-2.0
"""The model of the comparison: a small Llama with random weights of a seed, long enough for long prompts."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make(folder: str) -> None:
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
