# SPDX-License-Identifier: Apache-2.0
"""The ids under which callers know the requests of a worker."""

from __future__ import annotations

from collections.abc import Iterable


class RequestNames:
    """Internal request ids, found by what a caller says, without going through all of them.

    vLLM appends ``-`` and eight characters to the caller's id, and calls the samples of one request ``0_<its internal
    id>``, ``1_...``. Where several have one external id, they are in the order in which they came.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """names: internal ids."""
        self._all: set[str] = set()
        self._by_external: dict[str, dict[str, None]] = {}
        self._by_parent: dict[str, dict[str, None]] = {}
        for name in names:
            self.add(name)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str) -> None:
        """Takes in an internal id."""
        self._all.add(name)
        for names, key in self._keys(name):
            names.setdefault(key, {})[name] = None

    def discard(self, name: str) -> None:
        """Forgets an internal id."""
        self._all.discard(name)
        for names, key in self._keys(name):
            ids = names.get(key, {})
            ids.pop(name, None)
            if not ids:
                names.pop(key, None)

    def matching(self, requests: Iterable[str]) -> list[str]:
        """The internal ids of these external or internal ones, each once."""
        return list(dict.fromkeys(name for one in requests for name in self._matching(one)))

    def with_samples(self, requests: Iterable[str]) -> list[str]:
        """As :meth:`matching`, with all samples of a request of which one is asked for, or its own internal id is."""
        requests = list(requests)
        parents = dict.fromkeys(parent for one in requests for parent in (one, _parent(one)))
        samples = (name for parent in parents for name in sorted(self._by_parent.get(parent, ())))
        return list(dict.fromkeys([*self.matching(requests), *samples]))

    def _matching(self, one: str) -> list[str]:
        return [*self._by_external.get(one, ()), *([one] if one in self._all else [])]

    def _keys(self, name: str) -> list[tuple[dict[str, dict[str, None]], str]]:
        """Where a name stands."""
        parent = _parent(name)
        return [(self._by_external, external_id(name)), *([(self._by_parent, parent)] if parent else [])]


def external_id(name: str) -> str:
    """The request id that the caller knows: vLLM appends '-' and eight characters to it inside the engine."""
    stem, _, suffix = name.rpartition("-")
    return stem if len(suffix) == 8 and stem else name


def _parent(name: str) -> str:
    return name.partition("_")[2]
