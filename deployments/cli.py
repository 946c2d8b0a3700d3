"""Entry point of `eyas`."""

from eyas.deployments.commands import run as main

__all__ = ["main"]
