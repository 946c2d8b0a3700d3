"""A process that does not outlive the one that started it, however that one ends."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """From now on this process ends when its parent does; one that `multiprocessing` did not start is left alone.

    A daemon process is ended by its parent only where that one exits by itself: killed, it leaves its children at work.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent,), daemon=True).start()


def _wait(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
