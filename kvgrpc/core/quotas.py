# SPDX-License-Identifier: Apache-2.0
"""What tenants (salts) may hold, changed while the server runs."""

from __future__ import annotations

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Index
from kvgrpc.core.ledger import Ledger
from kvgrpc.core.types import Quota


class Quotas:
    """Room inside a quota is made by whoever stores (``Index.reserve``); this is for a quota that becomes smaller."""

    def __init__(self, ledger: Ledger, index: Index) -> None:
        self._limits = ledger.limits
        self._index = index

    def set(self, cache_salt: str, size_bytes: int | None) -> None:
        """None = no quota. Refuses: SPACE_LIMIT."""
        index, known = self._index, self.get(cache_salt)
        if known.size_bytes is None and size_bytes is not None and index.eviction.quotas >= self._limits.spaces:
            raise Refusal(Reason.SPACE_LIMIT, "too many tenants have a quota on this server", resource="spaces")
        if known.size_bytes != size_bytes:
            index.eviction.set_quota(index.account(cache_salt), size_bytes)

    def get(self, cache_salt: str) -> Quota:
        account = self._index.accounts.get(cache_salt)
        return Quota(None, 0) if account is None else Quota(account.quota_bytes, account.used_bytes)

    def shrink(self, cache_salt: str) -> int:
        """Evicts a turn of the tenant's own chunks as long as it has more than it may; how many. 0: enough, or nothing
        that nobody uses."""
        account = self._index.accounts.get(cache_salt)
        if account is None or account.quota_bytes is None or account.used_bytes <= account.quota_bytes:
            return 0
        over_bytes = account.used_bytes - account.quota_bytes
        return self._index.evict(over_bytes, self._limits.victims_per_turn, account)
