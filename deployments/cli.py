"""Entry point of `eyas`: prepares the process before anything loads torch, then runs the command."""

from __future__ import annotations

import os

from eyas.workers.threads import THREAD_ENVIRONMENT


def main() -> None:
    """Run `eyas`."""
    for name, value in THREAD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from eyas.deployments.commands import run

    run()
