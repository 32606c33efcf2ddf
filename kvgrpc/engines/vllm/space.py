# SPDX-License-Identifier: Apache-2.0
"""Who an engine is, out of vLLM's configuration: everything that changes the bytes of a block.

vLLM's own block hashes contain tokens, LoRA adapter, salt, multimodal inputs and prompt embeddings, and nothing of
model, types, layout or ranks: that is what the space adds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvgrpc.api import OWN_HASH_ALGORITHM
from kvgrpc.client.parallel import ParallelStrategy
from kvgrpc.core.types import SpaceIdentity
from kvgrpc.engines.vllm.groups import (
    UnsupportedError,
    check_form,
    check_groups,
    check_pooling,
    groups_of,
    kind_of,
    name_of,
)
from kvgrpc.engines.vllm.memory import Form
from kvgrpc.engines.vllm.ports import Groups
from kvgrpc.transfer.layout import stored_form

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.json")
MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Of vLLM's options for images and the like, those that change what its layers see; none of them is usual."""
UNNAMED = (
    "with --mm-processor-cache-gb 0 and without prefix caching vLLM counts images and the like instead of hashing "
    "them: requests with any are not cached"
)
NOTED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""See ``_architecture``."""
SEEDLESS = "xxhash"
"""Block hashes of this family begin with random bytes in each process unless PYTHONHASHSEED is set."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the connector needs to know of its engine."""

    engine_id: str
    identity: SpaceIdentity
    forms: tuple[Form, ...]
    """One a KV group."""
    groups: Groups
    hash_block_size: int
    own_hashes: bool
    media_named: bool
    """Whether block hashes name images and the like by their content; else requests with any must not be cached."""
    ahead: int
    strategy: ParallelStrategy
    notes: tuple[str, ...] = ()
    """To be said once in the log."""


def facts_of(config: Any, kv_config: Any, namespace: str, hashes: str, seed: str | None, version: str) -> Facts:
    """``seed``: PYTHONHASHSEED, None where it is not set. ``version``: vLLM's, since layouts follow the program.

    Raises UnsupportedError.
    """
    _check_parallel(config.parallel_config)
    specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
    device = str(config.device_config.device_type)
    check_groups(kv_config.kv_cache_groups, config.speculative_config)
    check_pooling(config.model_config)
    is_mla = all(name_of(spec) == "MLAAttentionSpec" for spec in specs)
    model, cache = config.model_config, config.cache_config
    own_hashes, notes = _hashing(str(cache.prefix_caching_hash_algo), hashes, seed)
    media_named = _names_media(model, cache)
    algorithm = OWN_HASH_ALGORITHM if own_hashes else f"vllm:{cache.prefix_caching_hash_algo}"
    forms = tuple(
        _form(at, group, config, kv_config, f"vllm-{version}-{device}")
        for at, group in enumerate(kv_config.kv_cache_groups)
    )
    check_form(stored_form([form.group() for form in forms]))
    groups = groups_of(forms)
    strategy = _strategy(config, is_mla, len(forms) > 1)
    identity = SpaceIdentity(
        model=namespace or str(model.model),
        revision=_revision(config, namespace),
        kv_dtype=f"{cache.cache_dtype}/{_dtypes(specs)}".replace("torch.", ""),
        kv_world_size=strategy.kv_world_size,
        hash_algorithm=algorithm,
        stored_form=stored_form([form.group() for form in forms]),
    )
    return Facts(
        engine_id=str(config.kv_transfer_config.engine_id),
        identity=identity,
        forms=forms,
        groups=groups,
        hash_block_size=int(kv_config.hash_block_size or groups.block_size),
        own_hashes=own_hashes,
        media_named=media_named,
        ahead=int(config.num_prefill_lookahead_tokens),
        strategy=strategy,
        notes=notes if media_named else (*notes, UNNAMED),
    )


def _check_parallel(parallel: Any) -> None:
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedError(f"kvgrpc: {name} is {size}; only 1 is supported: ranks would hold parts of a block")


def _form(at: int, group: Any, config: Any, kv_config: Any, program: str) -> Form:
    """What is the same for all groups is said with the first one, since an identity is short."""
    spec = group.kv_cache_spec
    kind, window = kind_of(spec)
    attention = "mla" if name_of(spec) == "MLAAttentionSpec" else "attn"
    digest = _layout_digest(config, spec, str(config.device_config.device_type))
    return Form(
        tuple(group.layer_names),
        int(spec.block_size),
        int(kv_config.num_blocks),
        backend=attention if at else f"{program}-{attention}",
        layout=digest if at else f"{kv_config.kv_cache_layout or 'unknown'}-{digest}",
        kind=kind,
        window_tokens=window,
    )


def _hashing(algorithm: str, wanted: str, seed: str | None) -> tuple[bool, tuple[str, ...]]:
    """Whether the server hashes token ids itself, and what is to be said of that."""
    random = algorithm.startswith(SEEDLESS) and seed is None
    if wanted == "tokens":
        return True, ()
    if not random:
        return False, ()
    if wanted == "block":
        raise UnsupportedError(
            f"kvgrpc: hashes is 'block', but block hashes by {algorithm} differ in each process; "
            "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED"
        )
    return True, (
        f"block hashes by {algorithm} differ in each process unless PYTHONHASHSEED is set: the server hashes token ids "
        "instead, and requests with images, other inputs or prompt embeddings are not cached; sha256_cbor has no such "
        "limit",
    )


def _dtypes(specs: Sequence[Any]) -> str:
    """Of the groups that have one; those of states are part of their layout."""
    return "+".join(sorted({str(spec.dtype) for spec in specs if hasattr(spec, "dtype")}))


def _strategy(config: Any, is_mla: bool, hybrid: bool) -> ParallelStrategy:
    """Ranks that hold the same heads share objects. Of several groups each rank has its own: their numbers of heads may
    differ, and states are never the same."""
    parallel = config.parallel_config
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    heads = None if is_mla or hybrid else _heads(config)
    try:
        return ParallelStrategy(is_mla, tp * pp, int(parallel.rank) % (tp * pp), tp, pp, heads)
    except ValueError as error:
        raise UnsupportedError(f"kvgrpc: {error}") from error


def _heads(config: Any) -> int:
    """KV heads of the layers that have most of them: ranks that hold the same heads of those do so of all."""
    model, speculative = config.model_config, config.speculative_config
    counts = [int(model.get_total_num_kv_heads())]
    if speculative is not None and speculative.uses_draft_kv_cache():
        counts.append(int(speculative.draft_model_config.get_total_num_kv_heads()))
    for block in getattr(model.hf_text_config, "block_configs", None) or ():  # vLLM counts the first one's
        group = getattr(getattr(block, "attention", None), "n_heads_in_group", None)
        if group:
            counts.append(model.model_arch_config.total_num_attention_heads // int(group))
    return max(counts)


def _layout_digest(config: Any, spec: Any, device: str) -> str:
    """Shape of a block, and how kernels order its bytes: on a CPU that depends on the processor, on a card on vLLM's
    backend, which it chooses by the card's name unless it is told."""
    if name_of(spec) == "MambaSpec":
        facts: list[object] = [spec.block_size, spec.shapes, spec.dtypes, str(spec.mamba_type), spec.page_size_bytes]
    else:
        facts = [spec.block_size, getattr(spec, "num_kv_heads", 0), spec.head_size, getattr(spec, "head_size_v", None)]
        facts.append(spec.page_size_bytes)
        facts += [getattr(spec, "num_head_slots", None), getattr(spec, "state_content_bytes", None)]
    facts += [str(config.attention_config.backend), _processor() if device == "cpu" else _card()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    import platform

    import torch

    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    avx512 = getattr(torch.cpu, "_is_avx512_supported", lambda: False)()
    return f"{platform.machine()}/{amx}/{avx512}"


def _card() -> str:
    from vllm.platforms import current_platform  # pyright: ignore

    return str(current_platform.get_device_name())  # pyright: ignore


def _revision(config: Any, namespace: str) -> str:
    """What changes the values at a given model name. A namespace is the operator's word for the weights, so then only
    the program's part counts."""
    model = config.model_config
    hf = getattr(model, "hf_text_config", None) or model.hf_config
    facts: list[object] = [str(model.dtype), str(model.quantization), _said(model.quantization_config)]
    facts += [_architecture(hf), *model.architectures, model.hf_config_path, model.code_revision]
    facts += ["by a function" if callable(model.hf_overrides) else _said(model.hf_overrides)]
    facts += [config.cache_config.kv_cache_dtype_skip_layers, str(config.load_config.load_format) == "dummy"]
    facts += [*_longest(model), _processing(model), *_drafter(config.speculative_config)]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    if namespace:
        return digest
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
    return f"{digest}/{commit}/{_weights(str(model.model))}"


def _said(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _architecture(hf: Any) -> str:
    """A model's configuration without what says nothing of its KV, or is a fact of its own: where it lies, and what
    some models note in it while they are loaded, which the scheduler's half never sees."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in cast("list[Any]", value)]
        if isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            return {name: plain(each) for name, each in named.items() if name not in NOTED}
        return value

    return _said(plain(json.loads(hf.to_json_string(use_diff=False))))


def _longest(model: Any) -> list[object]:
    """By the longest prompt some models choose how they compute: LongRoPE its factors, Llama 4 its temperatures, unless
    it is told. Where vLLM fits it to the memory (-1), that is after the model was made."""
    longest = "fitted" if model.original_max_model_len == -1 else int(model.max_model_len)
    return [longest, model.override_generation_config.get("attn_temperature_tuning")]


def _processing(model: Any) -> str:
    """How the engine turns images and the like into what layers see, beside a request's own way: block hashes have the
    latter."""
    media = model.multimodal_config
    given = {name: getattr(media, name, None) for name in MEDIA}
    if given["video_pruning_rate"]:
        given["video_pruning_method"] = media.video_pruning_method
    return _said({name: value for name, value in given.items() if value})


def _names_media(model: Any, cache: Any) -> bool:
    """Without caches of its own vLLM saves itself the hashes: the first image of each process has one name then."""
    media = model.multimodal_config
    return media is None or media.mm_processor_cache_gb > 0 or bool(cache.enable_prefix_caching)


def _drafter(speculative: Any) -> list[object]:
    """Layers of a drafter lie beside those of the model, in the same blocks. Drafts out of the prompt have none."""
    if speculative is None or not speculative.uses_draft_kv_cache():
        return []
    drafter = speculative.draft_model_config
    return [speculative.method, str(drafter.model), drafter.revision or "", _weights(str(drafter.model))]


def _weights(model: str) -> str:
    """Of a local folder or file: names, sizes and times of its files, so that weights that were replaced are not
    mistaken."""
    place = Path(model)
    files = [place] if place.is_file() else sorted({path for pattern in WEIGHTS for path in place.glob(pattern)})
    if not files:
        return ""
    facts = [(path.name, found.st_size, found.st_mtime_ns) for path in files for found in (path.stat(),)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
