# SPDX-License-Identifier: Apache-2.0
"""The copy kernel, compiled by CuPy when a card first needs it, and kept in CuPy's cache."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvgrpc.transfer import _native

_loaded: dict[int, Any] = {}


def load_kernel(ordinal: int) -> int:
    """Handle of the kernel in the card's primary context; the module stays loaded. Raises RuntimeError with what to
    do."""
    if ordinal not in _loaded:
        try:
            cupy: Any = import_module("cupy")
        except ImportError as error:
            sentence = "CuPy is missing: install kvgrpc[cuda12] or kvgrpc[cuda13], or choose --copy-mode dma"
            raise RuntimeError(sentence) from error
        try:
            with cupy.cuda.Device(ordinal):
                module = cupy.RawModule(code=_native.PAGED_COPY_SOURCE)
                _loaded[ordinal] = module, module.get_function(_native.PAGED_COPY_NAME).kernel
        except (RuntimeError, ImportError, OSError, cupy.cuda.compiler.CompileException) as error:
            raise RuntimeError(f"the copy kernel cannot be compiled: {error}") from error
    return int(_loaded[ordinal][1].ptr)
