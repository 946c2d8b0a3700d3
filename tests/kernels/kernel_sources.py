"""The Triton kernels of the package as their sources name them, read without importing a module."""

from __future__ import annotations

import ast
from pathlib import Path

from eyas.kernels import aot

FOLDER = Path(aot.__file__).parent


def jit_functions() -> dict[str, list[str]]:
    """Names of all functions under `triton.jit`, by module file name."""
    return {file: [function.name for function in functions] for file, functions in _functions().items()}


def launched_kernels() -> set[str]:
    """Those that no other one calls: what a launcher starts."""
    functions = [function for of_file in _functions().values() for function in of_file]
    called = {
        node.id
        for function in functions
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
    }
    return {function.name for function in functions} - called


def _functions() -> dict[str, list[ast.FunctionDef]]:
    return {
        file.name: [
            node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        ]
        for file in sorted(FOLDER.glob("triton_*.py"))
    }
