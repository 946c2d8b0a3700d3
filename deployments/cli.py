"""Entry point of `eyas`, and of `python -m eyas.deployments.cli`."""

from eyas.deployments.commands import run as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
