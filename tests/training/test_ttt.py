from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.batch import Batch
from eyas.training.dataset import Corpus
from eyas.training.ttt import ChainAttention, training_time_test

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NUM_STEPS = 4
TOLERANCE = 1e-9  # in double precision, so that only the order of sums may differ


class GrowingCache:
    """Attention as a server would do it for one chain: every call's rows are appended and see all rows so far, or the
    last ones within a window."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        outputs = []
        for row in range(query.shape[0]):
            all_keys, all_values = self.keys.setdefault(layer, []), self.values.setdefault(layer, [])
            all_keys.append(key[row])
            all_values.append(value[row])
            first = 0 if options.window is None else max(0, len(all_keys) - options.window)
            keys, values = torch.stack(all_keys[first:]), torch.stack(all_values[first:])  # [L, Hkv, D]
            group = query.shape[1] // keys.shape[1]
            heads = []
            for head in range(query.shape[1]):
                scores = keys[:, head // group] @ query[row, head] / keys.shape[2] ** 0.5
                heads.append(scores.softmax(0) @ values[:, head // group])
            outputs.append(torch.stack(heads))
        return torch.stack(outputs)


def draft_by_hand(head: Eagle3Head, features: Tensor, token_ids: Tensor, base: int, num_steps: int) -> list[Tensor]:
    """States of a chain of true tokens drafted at row `base`, one row at a time."""
    cache = GrowingCache()
    for row in range(base + 1):
        state = head.extend(features[row, None], token_ids[row + 1, None], torch.tensor([row]), cache)
    states = [state[0]]
    for step in range(1, num_steps):
        state = head.step(state, token_ids[base + 1 + step, None], torch.tensor([base + step]), cache)
        states.append(state[0])
    return states


@pytest.fixture
def head(new_eagle3: Callable[..., Eagle3Head]) -> Eagle3Head:
    return new_eagle3(torch.arange(0, 64, 2)).double()


@pytest.fixture(scope="module")
def load(tiny_models: TinyModels, target_folder: Path, target: DecoderConfig) -> Callable[..., Eagle3Head]:
    """Makes a published head of several layers or with a window."""

    def load(num_layers: int, window: int | None) -> Eagle3Head:
        folder = tiny_models.head(target_folder, draft_vocab_size=32, sliding_window=window)
        shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
                  "self_attn.o_proj": (32, 32), "mlp.gate_proj": (40, 32), "mlp.up_proj": (40, 32),
                  "mlp.down_proj": (32, 40), "input_layernorm": (32,), "post_attention_layernorm": (32,)}  # fmt: skip
        further = {f"layers.{index}.{n}.weight": shape for index in range(1, num_layers) for n, shape in shapes.items()}
        weights = TargetWeights(target_folder, target)
        head = load_head(tiny_models.changed(folder, further), weights, torch.float64, torch.device("cpu"))
        assert isinstance(head, Eagle3Head)
        assert head.config.layers.windows == (window,) * num_layers
        return head

    return load


def test_every_step_equals_drafting_one_row_at_a_time(corpus: Corpus, head: Eagle3Head) -> None:
    """Catches a wrong shift, position, mask or own key at any step, and conversations that see each other."""
    check_against_drafting(corpus, head)


@pytest.mark.parametrize(("num_layers", "window"), [(2, None), (1, 1), (1, 2), (1, 3), (2, 6)])
def test_every_step_of_other_heads_equals_drafting(
    corpus: Corpus, load: Callable[..., Eagle3Head], num_layers: int, window: int | None
) -> None:
    """Catches keys of one layer seen by another, and a window that ends a row early or late, on the true rows or among
    the head's own steps."""
    check_against_drafting(corpus, load(num_layers, window))


@torch.no_grad()
def check_against_drafting(corpus: Corpus, head: Eagle3Head) -> None:
    batch = corpus.batch(corpus.conversations)
    features = batch.features.double()[:, : 3 * 32]
    steps = training_time_test(head, features, batch, NUM_STEPS)
    seen = [0] * NUM_STEPS
    offset = 0
    for length, prompt_length in zip(batch.lengths, batch.prompt_lengths, strict=True):
        rows = slice(offset, offset + length)
        for base in range(prompt_length - 2, length - 1):
            depth = min(NUM_STEPS, length - 1 - base)
            expected = draft_by_hand(head, features[rows], batch.token_ids[rows], base, depth)
            for step, state in enumerate(expected):
                torch.testing.assert_close(steps[step][seen[step]], state, atol=TOLERANCE, rtol=TOLERANCE)
                seen[step] += 1
        offset += length
    assert seen == [states.shape[0] for states in steps]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_equals_one_softmax_under_an_explicit_mask(corpus: Corpus, num_kv_heads: int) -> None:
    """Catches any key seen too many or missed, by the rule of EAGLE-3's training-time test: at step i a query at row t
    sees step 0's keys up to t of its conversation, and the key of row t itself of each of the steps 1 to i."""
    batch = corpus.batch(corpus.conversations)
    num_rows, num_heads, head_dim = sum(batch.lengths), 4, 8
    owner = [index for index, length in enumerate(batch.lengths) for _ in range(length)]
    generator = torch.Generator().manual_seed(0)
    keys, values, attention = [], [], ChainAttention(batch)
    for step in range(NUM_STEPS):
        query = torch.randn(num_rows, num_heads, head_dim, generator=generator, dtype=torch.float64)
        for made in (keys, values):
            made.append(torch.randn(num_rows, num_kv_heads, head_dim, generator=generator, dtype=torch.float64))
        if step:
            attention.begin_step(step)
        rows = batch.rows(step) if step else torch.arange(num_rows)
        actual = attention(0, query[rows], keys[step][rows], values[step][rows])
        mask = torch.full((num_rows, (step + 1) * num_rows), -torch.inf, dtype=torch.float64)
        for row in range(num_rows):
            for seen in range(row + 1):
                if owner[seen] == owner[row]:
                    mask[row, seen] = 0.0
            for earlier in range(1, step + 1):
                mask[row, earlier * num_rows + row] = 0.0
        for head in range(num_heads):
            shared = head * num_kv_heads // num_heads
            all_keys, all_values = (torch.cat([x[:, shared] for x in made]) for made in (keys, values))
            scores = query[:, head] @ all_keys.T / head_dim**0.5 + mask
            expected = (scores.softmax(1) @ all_values)[rows]
            torch.testing.assert_close(actual[:, head], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_steps_beyond_the_shortest_answer_are_empty(corpus: Corpus, head: Eagle3Head) -> None:
    """Catches more levels than a text has rows, which validation may ask for."""
    whole = corpus.batch(corpus.conversations[:1])
    batch = Batch(whole.token_ids[:6], whole.is_answer[:6], whole.features[:6], [6], [4])
    steps = training_time_test(head, batch.features.double()[:, : 3 * 32], batch, 6)
    assert [states.shape[0] for states in steps] == [3, 2, 1, 0, 0, 0]


def test_gradients_reach_every_weight(corpus: Corpus, head: Eagle3Head) -> None:
    """Catches a detached state between steps and weights left out of training; the embedding must stay frozen."""
    batch = corpus.batch(corpus.conversations)
    last = training_time_test(head, batch.features.double()[:, : 3 * 32], batch, NUM_STEPS)[-1]
    head.logits(last).square().sum().backward()
    without = [name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == ["embedding"]
