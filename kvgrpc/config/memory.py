# SPDX-License-Identifier: Apache-2.0
"""The size of L1 that follows from the memory that this process may take (``kvgrpc.transfer.room``).

The arena is a memfd: its pages count as memory of the process and its control group; no file system bounds them.
"""

from __future__ import annotations

from kvgrpc.config.settings import SettingsError
from kvgrpc.config.values import GIB, format_size
from kvgrpc.core.types import MIB

L1_DEFAULT_CAP = 4 * GIB
L1_DEFAULT_SHARE = 0.5


def choose_l1_size(asked_bytes: int | None, available_bytes: int, page_bytes: int, *, huge_pages: bool = False) -> int:
    """Bytes of L1: as asked, else half of what is available, up to the cap. SettingsError if it does not fit."""
    kind = "reserved huge pages (vm.nr_hugepages)" if huge_pages else "memory"
    more = f"give the container or machine more {kind}"
    there = f"{format_size(available_bytes)}{f' of {kind}' if huge_pages else ''} are available"
    if asked_bytes is None:
        chosen = min(L1_DEFAULT_CAP, int(available_bytes * L1_DEFAULT_SHARE)) // MIB * MIB
        if chosen < page_bytes:
            raise SettingsError(f"only {there}: too little for any L1; {more}")
        return chosen
    if asked_bytes > available_bytes:
        raise SettingsError(f"--l1-size: {format_size(asked_bytes)} do not fit, {there}; ask for less, or {more}")
    if asked_bytes < page_bytes:
        raise SettingsError(
            f"--l1-size: {format_size(asked_bytes)} is less than one page (--page-size, {format_size(page_bytes)})"
        )
    return asked_bytes
