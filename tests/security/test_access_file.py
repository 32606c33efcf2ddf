# SPDX-License-Identifier: Apache-2.0
"""The file of tenants: what it may say, and what is told about one that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgrpc.service.access import AccessError, read_access, token_hash
from kvgrpc.service.admission import Admission
from tests.security.guarded import write_access

HASH = token_hash("x")
WRONG: list[tuple[object, str]] = [
    ([], "access.json: all of it must be an object, as {...}"),
    ({}, "tenants is missing"),
    ({"tenants": {"a": {"tokens": ["plain"]}}}, "tenants.a.tokens.0: not what kvgrpc token prints"),
    ({"tenants": {"a": {"token": [HASH]}}}, "tenants.a.token is no field of this file"),
    ({"tenants": {"a": {"tokens": HASH}}}, "tenants.a.tokens must be a list, as [...]"),
    ({"tenants": {"a/b": {}}}, "String should match pattern"),
    ({"tenants": {"a": {"tokens": [HASH]}, "b": {"tokens": [HASH]}}}, "tenants a and b have one token"),
    ({"tenants": {"a": {"certificates": ["x"]}, "b": {"certificates": ["x"]}}}, "have one certificate"),
    ({"tenants": {"a": {"salts": {"s": "1GiB"}}, "b": {"salts": {"s": None}}}}, "tenant b has another quota"),
    ({"tenants": {"a": {"salts": {"s": "much"}}}}, "is not a size"),
    ({"tenants": {"a": {"salts": {"s": "9" * 400}}}}, "is more than any machine has"),
    ({"tenants": {"a": {"salts": {"s": 1 << 63}}}}, "tenants.a.salts.s"),
    ({"tenants": {"a": {"may": ["everything"]}}}, "may 'everything', which is neither engine, viewer, admin nor"),
    ({"tenants": {}, "socket": "a"}, "socket names a, which is no tenant"),
]


@pytest.mark.parametrize(("form", "sentence"), WRONG, ids=lambda one: str(one)[:40])
def test_a_file_that_cannot_be(form: object, sentence: str, tmp_path: Path):
    file = tmp_path / "access.json"
    file.write_text(json.dumps(form))
    with pytest.raises(AccessError) as error:
        read_access(file)
    assert sentence in str(error.value) and "plain" not in str(error.value)


def test_a_salt_has_one_quota(tmp_path: Path):
    """The file's was in force, and the flag's was not, without a word."""
    file = tmp_path / "access.json"
    write_access(file, red={"tokens": [HASH], "salts": {"a": "1GiB", "b": None}})
    admission = Admission(file, lambda _: None, 0.5)
    admission.check_quotas({"a": 1 << 30, "of nobody here": 5})
    for flags in ({"a": 1}, {"b": 1}):
        with pytest.raises(AccessError, match=r"another quota for the salt '[ab]' than --quota does"):
            admission.check_quotas(flags)


def test_a_file_that_is_no_json_says_where(tmp_path: Path):
    file = tmp_path / "access.json"
    file.write_text('{"tenants": {\n  "secret" 1}}')
    with pytest.raises(AccessError, match=r"it is no JSON from line 2, column 12 on$"):
        read_access(file)
    file.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(AccessError, match=r"it is no JSON$"):
        read_access(file)
    file.write_text("[" * 100_000)
    with pytest.raises(AccessError, match=r"it is nested too deeply$"):
        read_access(file)


def test_single_methods_can_be_allowed(tmp_path: Path):
    file = tmp_path / "access.json"
    write_access(file, a={"tokens": [HASH], "may": ["KvCacheService/Lookup"]})
    assert read_access(file).by_token[HASH].methods == {"/kvgrpc.v1.KvCacheService/Lookup"}
