# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, made from a seed: large enough that damaged KV changes what they say."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

COMMON = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def make_mla(folder: Path) -> Path:
    """Multi-head latent attention, with heads of DeepSeek's sizes: vLLM's kernels for cards take no others."""
    torch.manual_seed(1234)
    config = DeepseekV2Config(
        **COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        moe_intermediate_size=128,
        first_k_dense_replace=3,
    )
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    return folder


def make_llama(folder: Path, positions: int = 4096) -> Path:
    """Grouped-query attention: 4 layers, 4 heads on 2 KV heads. The weights are the same for any ``positions``."""
    torch.manual_seed(1234)
    common = COMMON | {"max_position_embeddings": positions}
    config = LlamaConfig(**common, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    return folder


def make_gemma3(folder: Path) -> Path:
    """As Gemma 3: five layers with a window of three blocks, then one of full attention."""
    torch.manual_seed(1234)
    config = Gemma3TextConfig(
        **COMMON | {"tie_word_embeddings": True},
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=96,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    model = Gemma3ForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.05  # else a token says itself, whatever its layers add
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    return folder


def make_lfm2(folder: Path) -> Path:
    """As LFM2: short convolutions, which keep a state, and two layers of full attention."""
    torch.manual_seed(1234)
    config = Lfm2Config(
        **COMMON,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention"] * 2,
        conv_dim=256,
        block_dim=256,
        block_ff_dim=512,
    )
    Lfm2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    return folder


def make_lora(folder: Path, seed: int) -> Path:
    """An adapter of make_llama's queries and values that changes what it says."""
    torch.manual_seed(seed)
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**facts, "task_type": "CAUSAL_LM"}))
    weights: dict[str, torch.Tensor] = {}
    for layer in range(4):
        for name, out in (("q_proj", 256), ("v_proj", 128)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 256, dtype=torch.bfloat16) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(out, 8, dtype=torch.bfloat16) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def make_eagle(folder: Path) -> Path:
    """A drafter of one layer, without a norm before it, for make_llama's model."""
    torch.manual_seed(4321)
    config = LlamaConfig(**COMMON, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    kept = {name: tensor.clone() for name, tensor in weights.items() if name.startswith("layers.")}
    kept["fc.weight"] = torch.randn(256, 512, dtype=torch.bfloat16) * 0.1
    save_file(kept, folder / "model.safetensors")
    return folder
