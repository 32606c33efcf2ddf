# SPDX-License-Identifier: Apache-2.0
"""What importing the client costs an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from types import FunctionType
from typing import Any, get_args, get_type_hints

import kvgrpc.client

HEAVY = ("torch", "cupy", "numpy", "pydantic", "pydantic_settings", "rich", "click", "structlog", "psutil")

EVERYTHING = "import kvgrpc.client as c; [getattr(c, name) for name in c.__all__]"


def fresh(code: str) -> dict[str, float]:
    """Runs code in a new interpreter: the modules that it loaded, and the seconds of the processor that it took."""
    script = (
        f"import json, sys, time; start = time.process_time(); {code}; seconds = time.process_time() - start; "
        "print(json.dumps({**{name: 1 for name in sys.modules}, 'seconds': seconds}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_the_client_loads_nothing_heavy() -> None:
    loaded = fresh(EVERYTHING)
    assert "kvgrpc.client.worker" in loaded
    assert not set(HEAVY) & set(loaded)
    assert not [
        name for name in loaded if name.startswith(("kvgrpc.service", "kvgrpc.runtime", "kvgrpc.config.settings"))
    ]


def test_import_time() -> None:
    assert fresh("import kvgrpc.client")["seconds"] < 1
    assert fresh(EVERYTHING)["seconds"] < 5


def test_names_are_lazy_and_wrong_ones_are_errors() -> None:
    loaded = fresh("import kvgrpc.client")
    assert "grpc" not in loaded
    assert not hasattr(kvgrpc.client, "Nonsense")
    assert all(getattr(kvgrpc.client, name) for name in kvgrpc.client.__all__)
    assert set(kvgrpc.client.__all__) <= set(dir(kvgrpc.client))
    assert set(kvgrpc.client.__all__) == set(kvgrpc.client._PLACES)


def test_all_that_a_call_needs_is_there() -> None:
    """Whatever a public method takes or gives of kvgrpc's own, and what that is made of, has a public name."""
    public = [getattr(kvgrpc.client, name) for name in kvgrpc.client.__all__]
    classes = [one for one in public if isinstance(one, type)]
    hinted: list[Any] = [*classes, *(one for one in public if isinstance(one, FunctionType))]
    for made in classes:
        hinted += [member for name, member in vars(made).items() if isinstance(member, FunctionType) and name[0] != "_"]
        hinted += [made.__init__] if "__init__" in vars(made) else []
    needed = {found for one in hinted for hint in get_type_hints(one).values() for found in own_types(hint)}
    assert {found.__name__ for found in needed - set(classes)} == set()


def own_types(hint: Any) -> set[Any]:
    """The classes of kvgrpc that a type hint is made of."""
    found = {hint} if isinstance(hint, type) and hint.__module__.startswith("kvgrpc.") else set()
    return found.union(*(own_types(part) for part in get_args(hint)))
