"""Accounting of KV pages: which are free. Physical slots are the workers' business."""

from __future__ import annotations


class PageAllocator:
    """Free list of a pool's pages; the same page numbers address target and drafter."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_slots: int) -> int:
        """Pages that hold `num_slots` token positions."""
        return -(-num_slots // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take `num_pages` pages, or None, taking nothing, when fewer are free."""
        if num_pages > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_pages)]

    def free(self, pages: list[int]) -> None:
        """Give pages back.

        Raises:
            RuntimeError: for a page that is already free, which would let two requests share it.
        """
        already_free = set(self._free).intersection(pages)
        if already_free or len(set(pages)) != len(pages):
            raise RuntimeError(f"pages {sorted(already_free) or pages} were freed twice")
        self._free.extend(reversed(pages))
