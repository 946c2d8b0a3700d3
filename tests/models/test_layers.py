from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.fused import REFERENCE, FusedOperations
from eyas.models.attention import Attention, rotate_and_attend
from eyas.models.head import DraftHead
from eyas.models.head_loading import load_head
from eyas.models.layers import use_operations
from eyas.models.llama import LlamaDecoder, load_decoder
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewAttention = Callable[[], Attention]

CPU = torch.device("cpu")
NUM_TOKENS = 12
TOLERANCE = 1e-4  # float32, other order of summation


class Recorder:
    """Operations that do the reference's work and note what they were asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.operations = replace(
            REFERENCE, add_rms_norm=self._noted("norm", REFERENCE.add_rms_norm),
            silu_gate=self._noted("gate", REFERENCE.silu_gate),
        )  # fmt: skip

    def _noted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            is_sum = name == "norm" and arguments[1] is not None
            self.calls.append("add and norm" if is_sum else name)
            return work(*arguments)

        return call


class FusedAttention:
    """`text_attention` behind the fused form, on operations that keep a pool of their own."""

    def __init__(self, attention: Attention, operations: FusedOperations) -> None:
        self._attention = attention
        self._operations = operations
        self.options: list[AttentionOptions] = []

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        raise AssertionError("asked for rotated heads")

    def rotated(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        num_heads: int,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        self.options.append(options)
        tokens, heads, head_dim = qkv.shape
        keys, values = torch.zeros(2, tokens, (heads - num_heads) // 2, head_dim)
        slots = torch.arange(tokens).flip(0)
        query = self._operations.rotate_and_store(qkv, rotation, slots, keys, values, num_heads)
        return self._attention(layer, query, keys[slots], values[slots], options)


def load_pair(tiny_models: TinyModels, kind: str, **options: Any) -> tuple[LlamaDecoder, DraftHead]:
    folder = tiny_models.target("Qwen3ForCausalLM", head_dim=16)
    target = load_decoder(folder, torch.float32, CPU)
    made = (tiny_models.head if kind == "eagle3" else tiny_models.eagle_head)(folder, **options)
    return target, load_head(made, TargetWeights(folder, target.config), torch.float32, CPU)


@torch.inference_mode()
def run_target(model: LlamaDecoder, attention: Attention) -> Tensor:
    """All captured states and the final one, `[T, 6 H]`."""
    capture = (0, 1, 2, 3, 4, model.config.final_index)
    features = model(torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS), attention, capture).features
    assert features is not None
    return features


@torch.inference_mode()
def run_head(head: DraftHead, attention: Attention) -> Tensor:
    """States of a committed text, and of one drafted level after it, `[T + 1, H]`."""
    features = torch.randn(NUM_TOKENS, 32 * len(head.capture), generator=torch.Generator().manual_seed(0))
    states = head.extend(features, torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS), attention)
    return torch.cat([states, head.step(states[-1:], torch.tensor([3]), torch.tensor([NUM_TOKENS]), attention)])


@pytest.mark.parametrize("operations", ["reference", "triton"])
def test_target_through_fused_operations(
    operations: str, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches states captured before what the layer above them adds, and heads or slots in another order."""
    model, _ = load_pair(tiny_models, "eagle3")
    expected = run_target(model, text_attention())
    fused = operations_named(operations)
    use_operations(model, fused)
    states = run_target(model, FusedAttention(text_attention(), fused))
    if fused is REFERENCE:
        assert torch.equal(states, expected)
    torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("operations", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle", {}),
        ("eagle3", {}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"norm_output": True}),
        ("eagle3", {"sliding_window": 5}),
    ],
)
def test_heads_through_fused_operations(
    kind: str, options: dict[str, Any], operations: str, tiny_models: TinyModels, text_attention: NewAttention
) -> None:
    """Catches a residual taken from the wrong state, and a last update that is forgotten or added twice."""
    _, head = load_pair(tiny_models, kind, **options)
    expected = run_head(head, text_attention())
    fused = operations_named(operations)
    use_operations(head, fused)
    attention = FusedAttention(text_attention(), fused)
    states = run_head(head, attention)
    if fused is REFERENCE:
        assert torch.equal(states, expected)
    torch.testing.assert_close(states, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert {options.window for options in attention.options} == {options.get("sliding_window")}


def operations_named(name: str) -> FusedOperations:
    if name == "reference":
        return REFERENCE
    pytest.importorskip("triton")
    from eyas.kernels.triton_fused import TRITON

    return TRITON


def test_every_norm_takes_up_what_is_pending(tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a norm or gate left behind on other operations, and sums made apart from the norms."""
    model, _ = load_pair(tiny_models, "eagle3")
    recorder = Recorder()
    use_operations(model, recorder.operations)
    with torch.inference_mode():
        model(torch.arange(3), torch.arange(3), text_attention())
    heads = ["norm", "norm"]  # of queries and keys
    layer = [*heads, "add and norm", "gate", "add and norm"]  # the last one belongs to the next layer, or is final
    assert recorder.calls == ["norm", *layer * model.config.num_layers]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_heads_norms_use_its_operations(kind: str, tiny_models: TinyModels, text_attention: NewAttention) -> None:
    """Catches a head whose norms are not reached by the walk over its modules."""
    _, head = load_pair(tiny_models, kind)
    recorder = Recorder()
    use_operations(head, recorder.operations)
    run_head(head, text_attention())
    assert recorder.calls.count("gate") == 2
    assert recorder.calls.count("add and norm") == 2
    assert recorder.calls.count("norm") == (4 if kind == "eagle3" else 0)


def test_objects_that_do_not_rotate_get_rotated_heads() -> None:
    """Catches options passed to attention that knows none, and values taken for keys."""
    seen: list[tuple[Any, ...]] = []

    def attention(*arguments: Any) -> Tensor:
        seen.append(arguments)
        return arguments[1]

    qkv = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    half_turn = -torch.ones(3, 1, 4), torch.zeros(3, 1, 4)
    windowed = AttentionOptions(window=2)
    for options in (PLAIN_ATTENTION, windowed):
        rotate_and_attend(attention, 7, qkv, half_turn, 4, options)
    for arguments in seen:
        assert arguments[0] == 7
        assert torch.equal(arguments[1], -qkv[:, :4])
        assert torch.equal(arguments[2], -qkv[:, 4:6])
        assert torch.equal(arguments[3], qkv[:, 6:])
    assert [arguments[4:] for arguments in seen] == [(), (windowed,)]
