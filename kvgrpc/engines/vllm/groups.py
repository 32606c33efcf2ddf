# SPDX-License-Identifier: Apache-2.0
"""The KV groups of a model: what their layers keep of a prefix, and which of them this connector cannot serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgrpc.api import GroupKind
from kvgrpc.engines.vllm.memory import Form
from kvgrpc.engines.vllm.ports import Groups
from kvgrpc.transfer.layout import MAX_FORM_BYTES

WITHOUT = "start vLLM with --disable-hybrid-kv-cache-manager, which keeps everything for such layers"
"""The way out for windows and chunked attention beside full attention; there is none for states."""


class UnsupportedError(ValueError):
    """A configuration that this connector cannot serve; said at start, by name."""


def name_of(spec: Any) -> str:
    return type(spec).__name__


def check_groups(groups: Sequence[Any], speculative: Any) -> None:
    """Raises UnsupportedError."""
    kinds = [kind_of(group.kv_cache_spec) for group in groups]
    if not kinds:
        raise UnsupportedError("kvgrpc: this model has no KV cache")
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups):
        raise UnsupportedError(
            "kvgrpc: this model has non-causal attention (a prefix LM): the KV of a prefix depends on what follows it, "
            "so that other prompts cannot have it"
        )
    if len(kinds) == 1 and kinds[0][0] is GroupKind.FULL:
        return
    names = ", ".join(sorted({name_of(group.kv_cache_spec) for group in groups}))
    hybrid = f"this model has {len(kinds)} KV cache group(s) ({names})"
    states = any(kind is GroupKind.RECURRENT for kind, _ in kinds)
    way_out = "" if states or len(kinds) == 1 else f"; {WITHOUT}"
    if speculative is not None and (states or speculative.uses_draft_kv_cache()):
        raise UnsupportedError(
            f"kvgrpc: {hybrid}, and speculative decoding by {speculative.method}, which are not supported together"
            f"{way_out}"
        )


def check_pooling(model: Any) -> None:
    """Raises UnsupportedError where vLLM pools over all tokens: it must compute all, and ends when one was loaded."""
    pooler = model.pooler_config
    if pooler is not None and not model.is_prefix_caching_supported:
        raise UnsupportedError(
            f"kvgrpc: pooling by {pooler.seq_pooling_type}, {pooler.tok_pooling_type} needs every token of a prompt "
            "to be computed, so that nothing can be loaded; start vLLM without the connector"
        )


def check_form(stored_form: str) -> None:
    """Raises UnsupportedError for a model of more groups than the protocol has room for in an identity."""
    if len(stored_form) > MAX_FORM_BYTES:
        raise UnsupportedError(
            f"kvgrpc: this model has {stored_form.count('+') + 1} KV cache groups, which is more than an identity has "
            f"room for; {WITHOUT}"
        )


def groups_of(forms: Sequence[Form]) -> Groups:
    return Groups(
        tuple(form.block_size for form in forms),
        frozenset(at for at, form in enumerate(forms) if form.kind is GroupKind.RECURRENT),
        whole=len(forms) > 1 or forms[0].kind is not GroupKind.FULL,
        again=all(map(_again, forms)),
    )


def _again(form: Form) -> bool:
    """Whether the blocks that vLLM allocates for a hit hold what its last token needs to be computed again: they begin
    with the window of the token behind the hit, and none is left of a chunk that ends with it."""
    if form.kind is GroupKind.SLIDING_WINDOW:
        return form.window_tokens % form.block_size != 1 % form.block_size
    return form.kind is GroupKind.FULL


def kind_of(spec: Any) -> tuple[GroupKind, int]:
    """What a group's layers keep, and its window. Raises UnsupportedError."""
    match name_of(spec):
        case "FullAttentionSpec" | "MLAAttentionSpec":
            return GroupKind.FULL, 0
        case "SlidingWindowSpec":
            return GroupKind.SLIDING_WINDOW, int(spec.sliding_window)
        case "ChunkedLocalAttentionSpec":
            return GroupKind.CHUNKED_LOCAL, int(spec.attention_chunk_size)
        case "MambaSpec" if spec.mamba_cache_mode == "align":
            return GroupKind.RECURRENT, 0
        case "MambaSpec":
            raise UnsupportedError(
                f"kvgrpc: recurrent states are kept by block with mamba_cache_mode 'align' only, not with "
                f"'{spec.mamba_cache_mode}'; vLLM has that mode with --enable-prefix-caching"
            )
        case other:
            raise UnsupportedError(
                f"kvgrpc: KV caches of kind {other} are not supported, only full attention, MLA, sliding windows, "
                "chunked attention and recurrent states"
            )
