"""The reference forms against formulas, and what the Triton launchers refuse; results are compared in `parity_*`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.kernels.fused import REFERENCE, FusedOperations, add_rms_norm, rotate, rotate_and_store, silu_gate


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def triton_operations() -> FusedOperations:
    pytest.importorskip("triton")
    from eyas.kernels.triton_fused import TRITON

    return TRITON


def test_norm_by_formula() -> None:
    """Catches a norm of one summand, an eps outside the root, and inputs that are written."""
    x, update, weight = random_tensor(3, 40), random_tensor(3, 40, seed=1), random_tensor(40, seed=2)
    copies = x.clone(), update.clone()
    normed, residual = add_rms_norm(x, update, weight, 0.1)
    total = (x + update).double()
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight
    assert torch.equal(residual, x + update)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, copies[0])
    assert torch.equal(update, copies[1])


def test_norm_without_update() -> None:
    """Catches a stream copied for nothing."""
    x, weight = random_tensor(3, 40), random_tensor(40, seed=2)
    normed, residual = add_rms_norm(x, None, weight, 1e-5)
    assert residual is x
    assert torch.equal(normed, add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_heads_go_where_they_belong(dtype: torch.dtype) -> None:
    """Catches rotated values, unrotated keys, and slots that nobody asked to be written."""
    tokens, num_heads, num_kv_heads, head_dim = 3, 4, 2, 8
    qkv = random_tensor(tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = random_tensor(tokens, 1, head_dim, seed=1)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values = (torch.full((6, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2))
    slots = torch.tensor([5, 0, 2])
    query = rotate_and_store(qkv, rotation, slots, keys, values, num_heads)
    assert torch.equal(query, rotate(qkv[:, :4], rotation))
    assert torch.equal(keys[slots], rotate(qkv[:, 4:6], rotation))
    assert torch.equal(values[slots], qkv[:, 6:])
    for cache in (keys, values):
        assert bool((cache[[1, 3, 4]] == 7.0).all())


def test_gate_by_formula() -> None:
    """Catches gate and up in each other's place."""
    gate, up = random_tensor(3, 20), random_tensor(3, 20, seed=1)
    expected = gate.double() * gate.double().sigmoid() * up.double()
    torch.testing.assert_close(silu_gate(torch.cat([gate, up], dim=1)).double(), expected, rtol=1e-6, atol=1e-6)


def test_backends_have_the_same_operations(triton_operations: FusedOperations) -> None:
    """Catches a backend that names the reference form as its own."""
    for name in FusedOperations.__slots__:
        fast, reference = getattr(triton_operations, name), getattr(REFERENCE, name)
        assert fast.__name__ == reference.__name__ == name
        assert "triton" in fast.__module__


X, WEIGHT = torch.zeros(4, 64), torch.ones(64)
ANGLES = torch.ones(4, 1, 16)
CACHE = torch.zeros(8, 2, 16)
QKV = torch.zeros(4, 8, 16)
SLOTS = torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ops: ops.add_rms_norm(X.double(), None, WEIGHT, 1e-5), "x: expected float32, bfloat16 or float16"),
        (lambda ops: ops.add_rms_norm(X[0], None, WEIGHT, 1e-5), r"x: expected .* got torch.float32 \[64\]"),
        (lambda ops: ops.add_rms_norm(X.T, None, torch.ones(4), 1e-5), "x: expected adjacent elements"),
        (lambda ops: ops.add_rms_norm(torch.zeros(1, 16385), None, WEIGHT, 1e-5), "1 to 16384 elements, got 16385"),
        (lambda ops: ops.add_rms_norm(X, None, WEIGHT[:32], 1e-5), r"weight: expected torch.float32 \[64\]"),
        (lambda ops: ops.add_rms_norm(X, None, WEIGHT.bfloat16(), 1e-5), "weight: expected torch.float32"),
        (lambda ops: ops.add_rms_norm(X, X[:2], WEIGHT, 1e-5), r"update: expected torch.float32 \[4, 64\]"),
        (lambda ops: ops.add_rms_norm(X, X.half(), WEIGHT, 1e-5), "update: expected torch.float32"),
        (lambda ops: ops.silu_gate(torch.zeros(2, 7)), r"gate_up: expected .* \[T, 2 I\], got torch.float32 \[2, 7\]"),
        (lambda ops: ops.silu_gate(torch.zeros(6, 8).T), "gate_up: expected adjacent columns"),
        (lambda ops: ops.silu_gate(torch.zeros(2, 8).int()), "gate_up: expected float32, bfloat16 or float16"),
    ],
)
def test_layouts_that_kernels_do_not_read_are_refused(
    call: Callable[[FusedOperations], object], message: str, triton_operations: FusedOperations
) -> None:
    """Catches a launch whose address arithmetic does not fit its tensors."""
    with pytest.raises(ValueError, match=message):
        call(triton_operations)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": QKV.double()}, "qkv: expected float32, bfloat16 or float16"),
        ({"qkv": QKV[:, :7]}, r"qkv: expected 4 \+ 2 \* 2 heads, got 7"),
        ({"qkv": QKV.transpose(0, 1).contiguous().transpose(0, 1)}, "heads of a token to be adjacent"),
        ({"qkv": torch.zeros(4, 8, 15)}, "even head dim of at most 256, got 15"),
        ({"qkv": torch.zeros(4, 8, 258)}, "even head dim of at most 256, got 258"),
        ({"rotation": (ANGLES.half(), ANGLES)}, r"cos: expected torch.float32 \[4, 1, 16\]"),
        ({"rotation": (ANGLES, ANGLES[:3])}, r"signed_sin: expected torch.float32 \[4, 1, 16\]"),
        ({"rotation": (ANGLES, torch.ones(4, 1, 32)[..., :16])}, "rotation: expected equal strides"),
        ({"slots": SLOTS.int()}, r"slots: expected torch.int64 \[4\]"),
        ({"slots": torch.arange(8)[::2]}, "slots: expected contiguous"),
        ({"key_cache": CACHE.bfloat16()}, r"key_cache: expected torch.float32 \[8, 2, 16\]"),
        ({"value_cache": CACHE[:7]}, r"value_cache: expected torch.float32 \[8, 2, 16\]"),
        ({"value_cache": torch.zeros(8, 16, 2).mT}, "value_cache: expected adjacent elements in a head"),
    ],
)
def test_heads_that_the_kernel_does_not_read_are_refused(
    changed: dict[str, object], message: str, triton_operations: FusedOperations
) -> None:
    """Catches a rotation of the wrong elements, and keys written over other tokens'."""
    arguments: dict[str, object] = {
        "qkv": QKV, "rotation": (ANGLES, ANGLES), "slots": SLOTS, "key_cache": CACHE.clone(),
        "value_cache": CACHE.clone(), "num_heads": 4,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        triton_operations.rotate_and_store(**(arguments | changed))


def test_faults_stay_in_their_rows() -> None:
    """Catches a NaN of one token that a norm, a rotation or a gate brings to another."""
    x = random_tensor(3, 16)
    x[1, 4] = math.nan
    normed, _ = add_rms_norm(x, None, torch.ones(16), 1e-5)
    assert normed.isnan().any(dim=1).tolist() == [False, True, False]
    assert silu_gate(x).isnan().any(dim=1).tolist() == [False, True, False]
