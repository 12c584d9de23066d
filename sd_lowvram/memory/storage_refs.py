"""Notification when storages are freed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..compat import STORAGES_ARE_OBJECTS
from ..compat.private import storage_expired, storage_key


class Deaths:
    """Callbacks for freed storages: ``died(storage_key)``, at once or at the next ``look``."""

    def __init__(self, died: Callable[[int], Any]) -> None:
        """
        Args:
            died: function of the key of a storage that was freed.
        """
        self._report = died
        self._references: dict[int, Any] = {}

    def watch(self, storage: torch.UntypedStorage) -> int:
        """Watch ``storage``; returns its key."""
        key: int = storage_key(storage)
        if STORAGES_ARE_OBJECTS:
            self._references[key] = weakref.ref(storage, functools.partial(self._note_death, key))
        else:
            self._references[key] = StorageWeakRef(storage)
        return key

    def look(self) -> None:
        """Look for freed storages, if torch does not report them."""
        if not STORAGES_ARE_OBJECTS:  # a trace asks at each operator, of every weight
            references = self._references.copy()  # a copy, because other threads remove entries meanwhile
            for key in [*filter(storage_expired, references)]:
                self._remove(key)

    def forget(self) -> None:
        """Stop watching all storages."""
        self._references.clear()

    def _note_death(self, key: int, reference: Any) -> None:
        if self._references.get(key) is reference:
            self._remove(key)

    def _remove(self, key: int) -> None:
        if self._references.pop(key, None) is not None:  # another thread may have found it too
            self._report(key)
