# SPDX-License-Identifier: Apache-2.0
"""What an operator can set (``kv_connector_extra_config``) and what a request can ask (``kv_transfer_params``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

from kvgrpc.core.types import DEFAULT_POLICY, MS, Policy, Priority

HASHES = ("auto", "block", "tokens")
REQUEST_PREFIX = "kvgrpc."
MOST_TOKENS = 1 << 40
DAY_S = 86_400
DAY_MS = 1000 * DAY_S
KINDS: dict[type[object], str] = {
    str: "a string",
    tuple: "a list of strings",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


@dataclass(frozen=True, slots=True)
class Options:
    """docs/engines/vllm.md explains each."""

    address: str = ""
    addresses: tuple[str, ...] = ()
    namespace: str = ""
    hashes: str = "auto"
    lookup_async: bool = True
    lookup_timeout_ms: int = 1_000
    lookup_block_ms: int = 200
    prefetch_timeout_ms: int = 10_000
    copy_timeout_ms: int = 30_000
    start_timeout_ms: int = 2_000
    store_share: float = 0.25
    store_generated: bool = True
    prefer_layout: bool = True


def parse_options(given: Mapping[str, object]) -> Options:
    """Raises ValueError, naming the option, for what cannot be meant: it is an operator's slip."""
    usual = Options()
    known: dict[str, object] = {field.name: getattr(usual, field.name) for field in fields(Options)}
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"kv_connector_extra_config: {name!r} is not an option; there are {', '.join(known)}")
        usually = known[name]
        kind = type(usually)
        if isinstance(usually, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(usually, tuple) and isinstance(value, list):
            items = cast("list[object]", value)
            value = tuple(items) if all(isinstance(each, str) for each in items) else items
        if type(value) is not kind:
            raise ValueError(f"kv_connector_extra_config: {name} must be {KINDS[kind]}, not {value!r}")
        if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= DAY_MS:
            raise ValueError(f"kv_connector_extra_config: {name} must be from 1 to {DAY_MS}, not {value}")
        values[name] = value
    options = Options(**values)  # pyright: ignore[reportArgumentType] - each value has the type of its default
    if options.hashes not in HASHES:
        raise ValueError(f"kv_connector_extra_config: hashes must be one of {', '.join(HASHES)}")
    if options.address and options.addresses:
        raise ValueError("kv_connector_extra_config: addresses are for engines that span nodes; give them or address")
    if not 0 < options.store_share <= 1:
        raise ValueError("kv_connector_extra_config: store_share must be above 0 and at most 1")
    return options


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request wants of the cache. Limits are tokens from the prompt's begin."""

    policy: Policy = DEFAULT_POLICY
    load_most: int = MOST_TOKENS
    store_most: int = MOST_TOKENS


NOTHING_ASKED = Wish()


def parse_wish(params: Mapping[str, object] | None) -> tuple[Wish, str]:
    """The wish, and what of it was not understood ("" mostly). A request comes from outside, so nothing raises: what
    is not understood counts as not said."""
    if not isinstance(params, Mapping):
        return NOTHING_ASKED, "is no JSON object" if params else ""
    mine = {name: value for name, value in params.items() if name.startswith(REQUEST_PREFIX)}
    if not mine:
        return NOTHING_ASKED, ""
    bad: list[str] = []

    def flag(name: str) -> bool:
        value = mine.pop(REQUEST_PREFIX + name, False)
        if not isinstance(value, bool):
            bad.append(f"{name} must be true or false")
        return value is True

    def number(name: str, default: int, most: int) -> int:
        value = mine.pop(REQUEST_PREFIX + name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            bad.append(f"{name} must be a number from 0 to {most}")
            return default
        return value

    priority = mine.pop(REQUEST_PREFIX + "priority", "normal")
    names = {each.name.lower(): each for each in Priority}
    if not isinstance(priority, str) or priority not in names:
        bad.append(f"priority must be one of {', '.join(names)}")
        priority = "normal"
    policy = Policy(
        no_store=flag("no_store"),
        no_lookup=flag("no_lookup"),
        retention_ns=number("retention_s", 0, DAY_S) * 1000 * MS,
        priority=names[priority],
    )
    wish = Wish(
        policy,
        number("max_load_tokens", MOST_TOKENS, MOST_TOKENS),
        number("max_store_tokens", MOST_TOKENS, MOST_TOKENS),
    )
    bad += [f"{name} is not known" for name in mine]
    return wish, "; ".join(bad)
