# SPDX-License-Identifier: Apache-2.0
"""Which engines share data, out of vLLM's configuration; and which configurations are refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Config
from typing import Any

import pytest

from kvgrpc.engines.vllm.groups import UnsupportedError
from kvgrpc.engines.vllm.options import Options, parse_options
from kvgrpc.engines.vllm.ports import Groups
from kvgrpc.engines.vllm.space import Facts, facts_of
from kvgrpc.v1.cache_pb2 import LookupRequest


class FullAttentionSpec(Config):
    pass


class MLAAttentionSpec(Config):
    pass


class SlidingWindowSpec(Config):
    pass


class ChunkedLocalAttentionSpec(Config):
    pass


class UniformTypeKVCacheSpecs(Config):
    pass


class MambaSpec(Config):
    pass


def spec(kind: type[Config] = FullAttentionSpec, **changes: Any) -> Any:
    usual = {"block_size": 32, "dtype": "torch.bfloat16", "num_kv_heads": 2, "head_size": 64, "page_size_bytes": 16384}
    return kind(**{**usual, **changes})


def facts(
    *, kinds: tuple[Any, ...] = (), namespace: str = "", hashes: str = "auto", seed: str | None = None, **changes: Any
) -> Facts:
    groups = [Config(kv_cache_spec=each, layer_names=["a", "b"]) for each in kinds or (spec(),)]
    text = Config(to_json_string=lambda use_diff: changes.get("text", "{}"), block_configs=changes.get("layers"))
    parallel = {
        "tensor_parallel_size": changes.get("tp", 1),
        "pipeline_parallel_size": changes.get("pp", 1),
        "rank": changes.get("rank", 0),
        "decode_context_parallel_size": changes.get("dcp", 1),
        "prefill_context_parallel_size": changes.get("pcp", 1),
    }
    config = Config(
        parallel_config=Config(**parallel),
        cache_config=Config(
            prefix_caching_hash_algo=changes.get("algorithm", "sha256"),
            cache_dtype=changes.get("kv", "auto"),
            kv_cache_dtype_skip_layers=changes.get("unquantized", []),
            enable_prefix_caching=changes.get("prefix_caching", True),
        ),
        load_config=Config(load_format=changes.get("load", "auto")),
        device_config=Config(device_type=changes.get("device", "cpu")),
        kv_transfer_config=Config(engine_id="e" * 32),
        speculative_config=changes.get("speculative"),
        num_prefill_lookahead_tokens=changes.get("ahead", 0),
        attention_config=Config(backend=changes.get("backend")),
        model_config=Config(
            model=changes.get("model", "org/model"),
            revision=changes.get("revision"),
            dtype="torch.bfloat16",
            quantization=None,
            quantization_config=changes.get("quantized"),
            architectures=changes.get("architectures", ["OneForCausalLM"]),
            hf_config_path=changes.get("config_path"),
            hf_overrides=changes.get("overrides", {}),
            code_revision=changes.get("code"),
            max_model_len=changes.get("longest", 4096),
            original_max_model_len=changes.get("asked", changes.get("longest")),
            multimodal_config=changes.get("media"),
            override_generation_config=changes.get("generation", {}),
            hf_text_config=text,
            hf_config=text,
            get_total_num_kv_heads=lambda: changes.get("heads", 2),
            model_arch_config=Config(total_num_attention_heads=64),
            pooler_config=changes.get("pooler"),
            is_prefix_caching_supported=changes.get("prefixes", True),
        ),
    )
    kv = Config(kv_cache_groups=groups, num_blocks=10, kv_cache_layout="LBHNC", hash_block_size=32)
    return facts_of(config, kv, namespace, hashes, seed, changes.get("version", "0.32.0"))


def images(**given: Any) -> Any:
    return Config(mm_processor_cache_gb=4, **given)


def speculative(method: str, drafter: str = "org/drafter", heads: int = 2) -> Any:
    return Config(
        method=method,
        uses_draft_kv_cache=lambda: method != "ngram",
        draft_model_config=Config(model=drafter, revision=None, get_total_num_kv_heads=lambda: heads),
    )


WINDOW = spec(SlidingWindowSpec, sliding_window=96)
CHUNKED = spec(ChunkedLocalAttentionSpec, attention_chunk_size=64)
STATE_FACTS = {
    "block_size": 64,
    "shapes": ((2, 256),),
    "dtypes": ("torch.bfloat16",),
    "mamba_type": "short_conv",
    "page_size_bytes": 16384,
}
STATE = MambaSpec(**STATE_FACTS, mamba_cache_mode="align")
UNALIGNED = MambaSpec(**STATE_FACTS, mamba_cache_mode="none")


def test_the_same_engine_twice_shares_whatever_its_number_of_blocks():
    assert facts().identity == facts().identity


@pytest.mark.parametrize(
    "other",
    [
        {"model": "org/other"},
        {"revision": "abc"},
        {"text": '{"rope": 2}'},
        {"longest": 131_072},  # LongRoPE turns keys by other factors
        {"asked": -1},
        {"generation": {"attn_temperature_tuning": True}},
        {"media": images(mm_processor_kwargs={"do_rescale": False})},
        {"media": images(media_io_kwargs={"video": {"num_frames": 8}})},
        {"media": images(video_pruning_rate=0.5, video_pruning_method="evs")},  # other tokens of a video are left
        {"media": images(mm_encoder_attn_dtype="fp8")},
        {"overrides": {"vision_feature_layer": -1}},
        {"architectures": ["OtherForCausalLM"]},
        {"config_path": "/elsewhere"},
        {"code": "abc"},
        {"quantized": {"ignore": ["lm_head"]}},
        {"unquantized": ["3"]},
        {"load": "dummy"},
        {"kv": "fp8"},
        {"tp": 2},
        {"algorithm": "sha256_cbor"},
        {"version": "0.33.0"},
        {"kinds": (spec(block_size=64),)},
        {"kinds": (spec(head_size=128),)},
        {"kinds": (spec(MLAAttentionSpec),)},
        {"kinds": (spec(num_head_slots=1),)},
        {"backend": "FLASHINFER"},
        {"hashes": "tokens"},
    ],
)
def test_what_changes_bytes_changes_the_space(other: dict[str, Any]):
    assert facts(**other).identity != facts().identity


def test_a_length_that_vllm_fits_to_the_memory_is_no_part_of_the_space():
    """Models are made before it is fitted; and the scheduler's half and the workers may know it at other times."""
    assert facts(asked=-1, longest=4096).identity == facts(asked=-1, longest=5000).identity
    assert facts(asked=4096, longest=4096).identity == facts(longest=4096).identity
    assert facts(generation={"temperature": 0.5}).identity == facts().identity


def test_what_is_noted_in_a_configuration_is_no_part_of_the_space():
    """Workers note it while they load the model, in processes of their own; and a copy lies elsewhere."""
    noted = '{"rope": 2, "dtype": "%s", "architectures": %s, "_name_or_path": "%s", "sub": [{"torch_dtype": "%s"}]}'
    usual, loaded = noted % ("float16", "null", "/one", "a"), noted % ("float32", '["B"]', "/two", "b")
    assert facts(text=usual).identity == facts(text=loaded).identity != facts(text='{"rope": 3}').identity


def test_how_weights_get_into_memory_is_no_part_of_the_space():
    assert facts(load="runai_streamer").identity == facts().identity


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "named"), [(0, False, False), (0, True, True), (4, False, True), (None, False, True)]
)
def test_images_that_vllm_only_counts_are_not_cached(cache_gb: int | None, prefix_caching: bool, named: bool):
    """Without caches of its own it does not hash them: the first image of each process has one name."""
    media = Config(mm_processor_cache_gb=cache_gb) if cache_gb is not None else None
    found = facts(media=media, prefix_caching=prefix_caching)
    assert (found.media_named, len(found.notes)) == (named, 0 if named else 1)


def test_a_changed_configuration_by_a_function_has_one_space_in_all_processes():
    assert len({facts(overrides=lambda hf: hf).identity for _ in range(2)}) == 1


def test_images_that_are_processed_alike_have_one_space():
    ways = [{"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}]
    assert len({facts(media=images(mm_processor_kwargs=way)).identity for way in ways}) == 1
    usual: list[Any] = [
        None,
        images(mm_processor_kwargs=None, video_pruning_method="evs"),
        images(mm_processor_kwargs={}),
    ]
    usual.append(images(video_pruning_rate=0.0, video_pruning_method="vidcom2", media_io_kwargs={}))
    assert len({facts(media=media).identity for media in usual}) == 1


def test_layers_of_a_drafter_are_part_of_the_blocks():
    drafted = [facts(speculative=speculative("eagle", drafter)).identity for drafter in ("org/one", "org/two")]
    drafted.append(facts(speculative=speculative("draft_model", "org/one")).identity)
    assert len({facts().identity, *drafted}) == 4
    assert facts(speculative=speculative("ngram")).identity == facts().identity


def test_weights_that_were_replaced_under_one_path_are_others(tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1" * 8)
    before = facts(model=str(tmp_path)).identity
    assert facts(model=str(tmp_path)).identity == before
    weights.write_bytes(b"2" * 9)
    assert facts(model=str(tmp_path)).identity != before
    assert facts(model=str(tmp_path), namespace="n").identity == facts(model="elsewhere", namespace="n").identity


def test_a_file_of_weights_that_was_replaced_is_another(tmp_path: Path):
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"1" * 8)
    before = facts(model=str(weights)).identity
    weights.write_bytes(b"2" * 9)
    assert facts(model=str(weights)).identity != before


def test_groups_of_hybrid_models():
    hybrid = facts(kinds=(WINDOW, spec(), CHUNKED, STATE))
    assert [(form.kind.name, form.window_tokens, form.block_size) for form in hybrid.forms] == [
        ("SLIDING_WINDOW", 96, 32),
        ("FULL", 0, 32),
        ("CHUNKED_LOCAL", 64, 32),
        ("RECURRENT", 0, 64),
    ]
    assert hybrid.groups == Groups((32, 32, 32, 64), frozenset({3}), whole=True, again=False)
    assert hybrid.groups.block_size == 64
    assert (facts().groups, facts(kinds=(WINDOW,)).groups) == (Groups((32,)), Groups((32,), whole=True))
    assert facts(kinds=(spec(), WINDOW)).identity != facts(kinds=(spec(), spec())).identity
    assert facts(kinds=(spec(), WINDOW), speculative=speculative("ngram")).groups.whole


@pytest.mark.parametrize(("window", "again"), [(95, True), (96, True), (97, False), (98, True)])
def test_the_last_token_of_a_hit_is_computed_again_where_its_window_is_there(window: int, again: bool):
    """vLLM gives a hit the blocks of the window of the token behind it. With 97 tokens that window begins with a block,
    and the one of the hit's last token in the block before."""
    assert facts(kinds=(spec(), spec(SlidingWindowSpec, sliding_window=window))).groups.again is again


def test_ranks_of_hybrid_models_never_share_objects():
    """States differ where heads are the same."""
    strategies = [facts(kinds=(spec(), STATE), tp=4, heads=2, rank=rank).strategy for rank in range(4)]
    assert [(each.kv_rank, each.kv_world_size, each.is_kv_writer) for each in strategies] == [
        (rank, 4, True) for rank in range(4)
    ]
    mixed = facts(kinds=(spec(MLAAttentionSpec), STATE), tp=2, rank=1).strategy
    assert (mixed.kv_rank, mixed.kv_world_size) == (1, 2)


def test_ranks_share_the_heads_that_all_layers_share():
    """Two of four ranks hold the same of a layer with two heads, but not of one with four."""
    drafted = facts(tp=4, rank=3, heads=2, speculative=speculative("eagle", heads=4)).strategy
    assert (drafted.kv_rank, drafted.kv_world_size) == (3, 4)
    assert facts(tp=4, rank=3, heads=2, speculative=speculative("eagle", heads=1)).strategy.kv_world_size == 2
    assert facts(tp=4, rank=3, heads=2, speculative=speculative("ngram", heads=4)).strategy.kv_world_size == 2
    layers = [Config(attention=Config(n_heads_in_group=each)) for each in (32, None, 16)] + [Config(attention=None)]
    assert facts(tp=4, rank=3, heads=2, layers=layers).strategy.kv_world_size == 4


def test_parallel_places():
    ranks = [facts(tp=2, pp=2, rank=rank).strategy.kv_rank for rank in range(4)]
    assert ranks == [0, 1, 2, 3]
    replica = facts(tp=2, rank=3)
    assert (replica.identity, replica.strategy.rank) == (facts(tp=2).identity, 1)  # of the second data-parallel replica
    shared = facts(kinds=(spec(MLAAttentionSpec),), tp=4, rank=2).strategy
    assert (shared.kv_world_size, shared.kv_rank, shared.is_kv_writer) == (1, 0, False)
    assert facts(tp=4, rank=3, heads=2).strategy.kv_rank == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dcp": 2}, "decode_context_parallel_size is 2"),
        ({"pcp": 2}, "prefill_context_parallel_size is 2"),
        ({"kinds": (spec(non_causal=True),)}, "non-causal"),
        ({"kinds": (spec(), spec(non_causal=True))}, "non-causal"),
        ({"pooler": Config(seq_pooling_type="MEAN", tok_pooling_type="ALL"), "prefixes": False}, "pooling .*MEAN"),
        ({"kinds": (spec(), UNALIGNED)}, "mamba_cache_mode 'align' only, not with 'none'"),
        ({"kinds": (spec(UniformTypeKVCacheSpecs),)}, "kind UniformTypeKVCacheSpecs are not supported"),
        ({"kinds": (spec(), WINDOW), "speculative": speculative("eagle")}, "speculative decoding by eagle"),
        ({"kinds": (spec(), STATE), "speculative": speculative("ngram")}, "speculative decoding by ngram"),
        ({"kinds": (spec(), *[WINDOW] * 40)}, "41 KV cache groups, which is more than an identity has room for"),
        ({"algorithm": "xxhash", "hashes": "block"}, "differ in each process"),
        ({"tp": 3, "heads": 2}, "one must divide the other"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(wrong: dict[str, Any], said: str):
    with pytest.raises(UnsupportedError, match=said):
        facts(**wrong)


def test_a_model_that_pools_its_last_token_is_served():
    assert facts(pooler=Config(seq_pooling_type="LAST", tok_pooling_type="ALL")).identity == facts().identity
    assert facts(prefixes=False).identity == facts().identity  # generates, and vLLM's own cache is no measure


def test_hashes_that_differ_in_each_process_are_not_used():
    random = facts(algorithm="xxhash")
    assert random.own_hashes
    assert len(random.notes) == 1
    seeded = facts(algorithm="xxhash", seed="0")
    assert (seeded.own_hashes, seeded.notes, facts().own_hashes) == (False, (), False)


def test_options():
    assert parse_options({}) == Options()
    assert parse_options({"address": "unix:/s", "store_share": 1, "lookup_async": False}).store_share == 1.0
    assert parse_options({"addresses": ["a:1", "b:1"]}).addresses == ("a:1", "b:1")
    for wrong in (
        {"adress": "x"},
        {"lookup_async": 1},
        {"lookup_timeout_ms": 0},
        {"hashes": "md5"},
        {"store_share": 2},
        {"addresses": "unix:/s"},
        {"addresses": [1]},
        {"addresses": ["unix:/s"], "address": "unix:/s"},
    ):
        with pytest.raises(ValueError, match=f"kv_connector_extra_config.*{next(iter(wrong))}"):
            parse_options(wrong)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("addresses", "unix:/s", "a list of strings"),
        ("addresses", [1], "a list of strings"),
        ("address", None, "a string"),
        ("lookup_async", "false", "true or false"),
        ("store_share", "0.5", "a number"),
        ("lookup_timeout_ms", 1.5, "a whole number"),
        ("lookup_timeout_ms", 0, "from 1 to 86400000"),
        ("prefetch_timeout_ms", 86_400_001, "from 1 to 86400000"),
    ],
)
def test_a_wrong_value_is_told_in_words_of_json(name: str, value: object, meant: str):
    with pytest.raises(ValueError, match=f"{name} must be {meant}, not "):
        parse_options({name: value})


def test_the_longest_wait_fits_a_lookup():
    most = parse_options({"prefetch_timeout_ms": 86_400_000}).prefetch_timeout_ms
    message = LookupRequest()
    message.prefetch_wait_ms = most
    assert message.prefetch_wait_ms == most
