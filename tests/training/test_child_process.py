from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

_PARENT = """
import multiprocessing, time
from eyas.training.child_process import end_with_parent

def work():
    end_with_parent()
    time.sleep(120)

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    child.start()
    print(child.pid, flush=True)
    child.join()
"""


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_when_its_parent_is_killed() -> None:
    """Catches corpus writers and ranks that work on for hours after the command that started them was killed."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert _is_running(child)
            parent.kill()
            parent.wait()
            deadline = time.monotonic() + 30
            while _is_running(child) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not _is_running(child)
        finally:
            if _is_running(child):
                os.kill(child, signal.SIGKILL)
