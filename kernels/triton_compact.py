# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""`kernels.compact.compact` as one Triton kernel: one launch moves the rows of all requests in all caches.

A program owns one request, one cache and a stretch of a slot's elements. It reads that stretch of all the request's
source slots into registers, waits for its other threads to have done so, and only then writes: no order of sources and
destinations can make it read what it wrote. Programs never meet, their stretches and their requests' slots being
disjoint. Rows that stay where they are cost nothing. The host reads nothing back.

Letters: C caches, S slots, E elements of a slot, B requests, A rows of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.aot import AotCase
from eyas.kernels.launch_checks import check_layout

MAX_ROWS = 64
TILE = 4096  # elements a program holds, 32 for each of its 128 threads
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def _compact_kernel(
    caches_ptr,
    source_slots_ptr,
    destination_slots_ptr,
    num_rows,
    num_slots,
    num_elements,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    caches_ptr += tl.program_id(1).to(tl.int64) * num_slots * num_elements
    rows = tl.arange(0, ROWS)
    sources = tl.load(source_slots_ptr + request * num_rows + rows, mask=rows < num_rows, other=-1)
    destinations = tl.load(destination_slots_ptr + request * num_rows + rows, mask=rows < num_rows, other=-1)
    moves = (sources >= 0) & (sources != destinations)
    if tl.max(moves.to(tl.int32), axis=0) > 0:
        elements = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
        is_moved = moves[:, None] & (elements < num_elements)[None, :]
        values = tl.load(caches_ptr + sources[:, None] * num_elements + elements[None, :], mask=is_moved)
        tl.debug_barrier()
        tl.store(caches_ptr + destinations[:, None] * num_elements + elements[None, :], values, mask=is_moved)


def compact(caches: Tensor, source_slots: Tensor, destination_slots: Tensor) -> None:
    """See `kernels.compact.compact`, with the same arguments. Never waits for the device.

    Raises:
        ValueError: for more than `MAX_ROWS` rows of one request, another dtype than `DTYPES`, and when a tensor is not
            contiguous or not of the documented shape.
    """
    if source_slots.shape != destination_slots.shape:
        raise ValueError(f"{source_slots.numel()} source slots for {destination_slots.numel()} destinations")
    if source_slots.ndim not in (1, 2):
        raise ValueError(f"source_slots: expected [B, A] or [M], got {list(source_slots.shape)}")
    batch, num_rows = source_slots.shape if source_slots.ndim == 2 else (1, source_slots.shape[0])
    if num_rows > MAX_ROWS:
        raise ValueError(f"source_slots: expected at most {MAX_ROWS} rows of one request, got {num_rows}")
    if caches.ndim < 2 or caches.dtype not in DTYPES:
        raise ValueError(f"caches: expected [C, S, ...] in {list(DTYPES)}, got {caches.dtype} {list(caches.shape)}")
    check_layout("caches", caches, tuple(caches.shape), caches.dtype, source_slots.device)
    check_layout("source_slots", source_slots, tuple(source_slots.shape), torch.int64, caches.device)
    check_layout("destination_slots", destination_slots, tuple(source_slots.shape), torch.int64, caches.device)
    num_caches, num_slots = caches.shape[:2]
    num_elements = caches[0, 0].numel() if num_caches and num_slots else 0
    if not batch * num_rows * num_elements:
        return
    rows, elements, num_warps = _launch_shape(num_rows, num_elements)
    _compact_kernel[(batch, num_caches, triton.cdiv(num_elements, elements))](
        caches,
        source_slots,
        destination_slots,
        num_rows,
        num_slots,
        num_elements,
        ROWS=rows,
        ELEMENTS=elements,
        num_warps=num_warps,
    )


def _launch_shape(num_rows: int, num_elements: int) -> tuple[int, int, int]:
    """Rows and elements of a program's tile, and its warps."""
    rows = triton.next_power_of_2(num_rows)
    elements = min(TILE // rows, max(triton.next_power_of_2(num_elements), 16))
    return rows, elements, 4 if rows * elements >= 1024 else 1


def _aot_case(dtype: str, num_rows: int) -> AotCase:
    rows, elements, num_warps = _launch_shape(num_rows, 8 * 128)
    return AotCase(
        kernel=_compact_kernel,
        signature={
            "caches_ptr": f"*{dtype}",
            "source_slots_ptr": "*i64",
            "destination_slots_ptr": "*i64",
            "num_rows": "i32",
            "num_slots": "i32:16",
            "num_elements": "i32:16",
        },
        constexprs={"ROWS": rows, "ELEMENTS": elements},
        num_warps=num_warps,
        label=f"{dtype} A={num_rows}",
    )


AOT = [_aot_case(dtype, num_rows) for dtype in DTYPES.values() for num_rows in (1, 8, 16, 64)]
