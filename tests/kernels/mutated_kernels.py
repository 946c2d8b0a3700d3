"""A pytest plugin (`-p mutated_kernels`) that puts the folder $MUTATED_KERNELS in the place of `eyas.kernels`.

The package is a namespace that an editable install maps to its folder; this finder comes before all others.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

FOLDER = Path(os.environ["MUTATED_KERNELS"])


class MutatedKernels:
    """Finds `eyas.kernels` and its modules in `FOLDER`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "eyas.kernels":
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(FOLDER)]
            return spec
        if name.startswith("eyas.kernels."):
            return spec_from_file_location(name, FOLDER / f"{name.removeprefix('eyas.kernels.')}.py")
        return None


sys.meta_path.insert(0, MutatedKernels)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Whoever imported the package before this plugin would test the wrong kernels."""
    for name, module in sys.modules.items():
        if name.startswith("eyas.kernels.") and Path(str(module.__file__)).parent != FOLDER:
            pytest.exit(f"{name} comes from {module.__file__}", returncode=3)
