"""Compile a Triton kernel for a GPU that need not be there, and read off what it costs.

Triton turns a kernel, the types of its arguments and its compile-time constants into machine code with the `ptxas` it
ships; no driver and no device take part. What `ptxas` reports about that very code - registers, spilled bytes - tells
whether the specialisations that will be launched fit the hardware. Speed and results are not known here.

The process must not run Triton's interpreter (`TRITON_INTERPRET`): it replaces kernels when they are defined.
"""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

# Most shared memory a block may ask for, by compute capability (CUDA C programming guide, technical specifications).
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

# Alignment in bytes that pointers are compiled for: Triton specialises on it, and what torch allocates has it.
POINTER_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class AotCase:
    """One specialisation of a kernel that some launcher asks for.

    Args:
        kernel: the function under `triton.jit`.
        signature: type of each argument by name, as Triton writes them: `*bf16`, `i32`, `fp32`, `constexpr`. Integers
            known to be multiples of 16 carry that, `i32:16`; pointers are always taken to be aligned.
        constexprs: values of the `constexpr` arguments by name; these need not stand in the signature.
        label: tells this case from the kernel's others, e.g. `bf16 D=128`.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    label: str = ""
    num_stages: int = 3

    @property
    def name(self) -> str:
        """Kernel and label, unique among all cases."""
        return f"{self.kernel.__name__}[{self.label}]"


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """What the machine code of one case takes on one target.

    Args:
        kernel: name of the kernel.
        capability: 80, 90 or 100.
        registers: of each thread.
        spill_bytes: stored to and loaded from local memory because registers ran out, in the code of one thread.
        shared_bytes: of each block.
        stack_bytes: of each thread; spills live there, and arrays indexed at run time.
    """

    label: str
    kernel: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int

    @property
    def problem(self) -> str | None:
        """Why this must not be launched, or None."""
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes"
        if self.stack_bytes:
            return f"keeps {self.stack_bytes} bytes on the stack"
        if self.shared_bytes > (limit := MAX_SHARED_BYTES[self.capability]):
            return f"asks for {self.shared_bytes} bytes of shared memory of at most {limit}"
        return None


def compile_case(case: AotCase, capability: int) -> CompiledReport:
    """Compile `case` for a CUDA device of `capability` (80, 90, 100), past Triton's cache.

    Raises:
        ValueError: under the interpreter, for a capability without limits in `MAX_SHARED_BYTES`, or when signature and
            constexprs do not name exactly the kernel's arguments.
        triton.CompilationError and others of Triton: the kernel does not compile.
    """
    if not isinstance(case.kernel, triton.JITFunction):
        raise ValueError(f"{case.name}: only kernels defined without TRITON_INTERPRET can be compiled")
    if capability not in MAX_SHARED_BYTES:
        raise ValueError(f"compute capability {capability} is none of {sorted(MAX_SHARED_BYTES)}")
    source = _source(case)
    assembler_log = StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(assembler_log):
        knobs.nvidia.dump_ptxas_log = True  # to standard output; a hit in the cache would print nothing
        knobs.compilation.always_compile = True
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    log = assembler_log.getvalue()
    return CompiledReport(
        label=case.label,
        kernel=case.kernel.__name__,
        capability=capability,
        registers=max(_figures(log, r"Used (\d+) registers")),
        spill_bytes=sum(_figures(log, r"(\d+) bytes spill (?:stores|loads)")),
        shared_bytes=int(compiled.metadata.shared),
        stack_bytes=sum(_figures(log, r"(\d+) bytes stack frame")),
    )


def _source(case: AotCase) -> Any:
    names = list(case.kernel.arg_names)
    signature = dict.fromkeys(case.constexprs, "constexpr") | case.signature
    if set(signature) != set(names):
        difference = ", ".join(sorted(set(signature) ^ set(names)))
        raise ValueError(f"{case.name}: signature and arguments differ in {difference}")
    untold = [name for name, kind in signature.items() if kind == "constexpr" and name not in case.constexprs]
    if untold:
        raise ValueError(f"{case.name}: no value for constexpr {', '.join(untold)}")
    attributes = {}
    for name, kind in signature.items():
        if kind.startswith("*") or kind.endswith(":16"):
            attributes[(names.index(name),)] = [["tt.divisibility", POINTER_ALIGNMENT]]
    plain_types = {name: signature[name].removesuffix(":16") for name in names}
    return triton.compiler.ASTSource(case.kernel, plain_types, dict(case.constexprs), attributes)


def _figures(log: str, pattern: str) -> list[int]:
    figures = [int(figure) for figure in re.findall(pattern, log)]
    if not figures:
        raise RuntimeError(f"ptxas reported nothing like {pattern!r}:\n{log}")
    return figures
