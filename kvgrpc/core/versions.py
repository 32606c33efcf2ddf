# SPDX-License-Identifier: Apache-2.0
"""Clear and new generations: which version of each space is in force, and that it outlives the server.

The version is a part of the names of objects in lower tiers: what was stored under an earlier one is never found again.
So a server that starts over what an earlier one left must go on where that one stopped. A version moves by a step that
is no other server's, so that two that share a tier mean the same by the same version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvgrpc.core.errors import Reason, Refusal
from kvgrpc.core.index import Index, Space
from kvgrpc.core.types import Cleared, SpaceRef, Versions


class Versioning:
    """Moves versions. Those that an earlier server knew are kept until their identities and spaces are named again;
    what may concern them moves them, too, since they are digests of nobody knows what."""

    def __init__(self, index: Index, versions: Versions, step: int) -> None:
        self._index = index
        self._step = step
        index.first_version = versions.first
        index.known_bases = dict(versions.bases)
        index.known_spaces = dict(versions.spaces)

    def clear(self, space: SpaceRef | None, model: str | None, cache_salt: str | None, everything: bool) -> Cleared:
        """Forgets; exactly one target. Refuses: SPACE_UNKNOWN."""
        index, step = self._index, self._step
        if space is not None:
            index.space(space)
        hit = [
            found
            for ref, found in index.spaces.items()
            if everything or ref == space or found.facts.identity.model == model or ref.cache_salt == cache_salt
        ]
        for found in hit:
            found.version += step
        if space is None:
            for facts in index.bases.values():
                facts.version += step * (model is None or facts.identity.model == model)
            self._move_unnamed()
        return self._clear(hit)

    def bump(self, model: str, space_base: bytes) -> Cleared:
        """New weights under an old name; of a model, also of its identities that nobody has named, so all of those.
        Refuses: SPACE_UNKNOWN."""
        bases = self._index.bases.values()
        hit = [facts for facts in bases if facts.base == space_base or (model and facts.identity.model == model)]
        if not hit:
            raise Refusal(Reason.SPACE_UNKNOWN, "no engine has named such a model or space", field="target")
        spaces = [space for space in self._index.spaces.values() if space.facts in hit]
        for facts in hit:
            facts.generation += 1
        for one in (*hit, *spaces):
            one.version += self._step
        self._move_unnamed(space_base)
        return replace(self._clear(spaces), generation=max(facts.generation for facts in hit))

    def _move_unnamed(self, of: bytes = b"") -> None:
        """Spaces that were forgotten, or are not known yet: those ``of`` one identity, else all, and identities."""
        index, step = self._index, self._step
        if not of:
            index.first_version += step
            index.known_bases = {base: (at, version + step) for base, (at, version) in index.known_bases.items()}
        for digest, (base, version) in index.known_spaces.items():
            if of in (b"", base):
                index.known_spaces[digest] = (base, version + step)

    def _clear(self, spaces: Iterable[Space]) -> Cleared:
        cleared = [self._index.clear(space) for space in spaces]
        return Cleared(sum(c.removed_chunks for c in cleared), sum(c.still_pinned_chunks for c in cleared))

    def snapshot(self) -> Versions:
        """What the next server has to go on with."""
        index = self._index
        named = {base: (facts.generation, facts.version) for base, facts in index.bases.items()}
        bases = {base: at for base, at in named.items() if at != (0, index.first_version)}
        spaces = {
            space.digest: (ref.space_base, space.version)
            for ref, space in index.spaces.items()
            if space.version != space.facts.version
        }
        return Versions(index.first_version, {**index.known_bases, **bases}, {**index.known_spaces, **spaces})


def version_of(versions: Versions, base: bytes, digest: bytes) -> int:
    """The version of a space, by its identity and digest."""
    if digest in versions.spaces:
        return versions.spaces[digest][1]
    return versions.bases[base][1] if base in versions.bases else versions.first
