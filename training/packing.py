"""Cutting a sequence into groups of a bounded size: batches, shards, passes of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> list[list[Item]]:
    """Neighbours, in the given order, whose sizes add up to at most `limit`; a larger item is a group of its own."""
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups
