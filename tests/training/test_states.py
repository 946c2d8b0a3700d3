from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eyas.deployments.offline import OfflineEngine, OfflineRequest
from eyas.deployments.pages import PageAllocator
from eyas.deployments.scheduler import TreeShape
from eyas.models.decoder import Decoder
from eyas.models.parallel import TensorParallel
from eyas.models.target_loading import load_target_decoder
from eyas.training import states
from eyas.training.recording import FeatureRecorder
from eyas.training.states import TargetStates, recorded_layers
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE = 64, 4
CAPTURE = (0, 2, 4)
TARGETS: dict[str, dict[str, Any]] = {
    "native": {"architecture": "LlamaForCausalLM"},
    "sliding window": {"architecture": "MistralForCausalLM", "sliding_window": 5},
    "softcap and windows": {
        "architecture": "Gemma2ForCausalLM",
        "head_dim": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
}


@pytest.fixture(scope="module")
def load(tiny_models: TinyModels) -> Callable[[str], Decoder]:
    loaded: dict[str, Decoder] = {}

    def load(name: str) -> Decoder:
        if name not in loaded:
            loaded[name] = load_target_decoder(tiny_models.target(**TARGETS[name]), torch.float32, CPU)
        return loaded[name]

    return load


class ExactRecorder(FeatureRecorder):
    """Keeps float32 states as they are."""

    def extend(self, runs: list[Any], features: Tensor) -> None:
        for run, piece in zip(runs, features.split([run.num_committed for run in runs]), strict=True):
            self._parts.setdefault(run.request_id, []).append(piece.clone())


def answered(model: Decoder, recorder: FeatureRecorder) -> list[tuple[list[int], Tensor]]:
    """Texts the target goes on with, as the corpus writer makes them, and their states."""
    target = TargetRunner(model, PoolLayout(NUM_PAGES, PAGE_SIZE), CAPTURE)
    engine = OfflineEngine(LocalWorkers(target, recorder), PageAllocator(NUM_PAGES, PAGE_SIZE), TreeShape(), 2)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15]]
    requests = [OfflineRequest(prompt, SamplingParams(0.7, 1.0, 3), 10) for prompt in prompts]
    outputs = engine.generate(requests)
    return [
        (prompt + output.token_ids, recorder.take(output.request_id))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@pytest.mark.parametrize("name", TARGETS)
def test_states_are_those_a_recorder_keeps(name: str, load: Callable[[str], Decoder]) -> None:
    """Catches a position, a window or a layer that is not the one of serving, and conversations that see each other."""
    model = load(name)
    texts = answered(model, ExactRecorder())
    lengths = [recorded.shape[0] for _, recorded in texts]
    token_ids = torch.cat([torch.tensor(text[:length]) for (text, _), length in zip(texts, lengths, strict=True)])
    computed = TargetStates(model, CAPTURE)(token_ids, lengths)
    expected = torch.cat([recorded for _, recorded in texts])
    assert computed.shape == (sum(lengths), len(CAPTURE) * model.config.hidden_size)
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)
    assert not computed.requires_grad
    rounded = torch.cat([recorded for _, recorded in answered(model, FeatureRecorder())])
    torch.testing.assert_close(computed, rounded.float(), rtol=2**-8, atol=1e-3)


@settings(max_examples=25)
@given(data=st.data())
def test_packed_conversations_are_independent(data: st.DataObject, load: Callable[[str], Decoder]) -> None:
    """Catches a conversation whose states depend on what it is packed with, and order or cuts between passes."""
    compute = TargetStates(load(data.draw(st.sampled_from(sorted(TARGETS)))), CAPTURE)
    conversations = data.draw(
        st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=5), label="conversations"
    )
    pass_tokens = data.draw(st.integers(1, 30), label="tokens of a pass")
    lengths = [len(text) for text in conversations]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_PASS_TOKENS", pass_tokens)
        packed = compute(torch.tensor(sum(conversations, [])), lengths)
    for text, found in zip(conversations, packed.split(lengths), strict=True):
        torch.testing.assert_close(found, compute(torch.tensor(text), [len(text)]), rtol=1e-4, atol=1e-4)


def test_positions_begin_anew_in_every_conversation(load: Callable[[str], Decoder]) -> None:
    """Catches positions counted through a pack, which plain rotations do not show but others do."""
    model, seen = load("native"), []
    assert isinstance(model, nn.Module)
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].tolist()))
    TargetStates(model, CAPTURE)(torch.arange(6), [3, 1, 2])
    hook.remove()
    assert seen == [[0, 1, 2, 0, 0, 1]]


def test_what_a_corpus_keeps(load: Callable[[str], Decoder]) -> None:
    """Catches the last residual state missing, from which the target's distribution follows."""
    config = load("native").config
    assert recorded_layers(config) == (*config.default_aux_layers(), config.num_layers)


def test_what_cannot_be_computed_is_refused(load: Callable[[str], Decoder]) -> None:
    """Catches lengths that do not fit the tokens, and half the states of a target that is split."""
    model = load("native")
    with pytest.raises(ValueError, match="lengths: 3 tokens in all, but token_ids holds 4"):
        TargetStates(model, CAPTURE)(torch.arange(4), [1, 2])
    model.parallel, alone = TensorParallel(0, 2, None), model.parallel  # type: ignore[misc]
    try:
        with pytest.raises(ValueError, match="split over several"):
            TargetStates(model, CAPTURE)
    finally:
        model.parallel = alone  # type: ignore[misc]
