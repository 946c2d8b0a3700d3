"""Every kind of head that can be trained, through the same three questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleHead
from eyas.models.head_loading import load_head
from eyas.models.medusa import MedusaHead
from eyas.models.target_weights import TargetWeights
from eyas.training.batch import Batch
from eyas.training.dataset import Corpus
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.methods import training_method
from eyas.training.objective import Objective
from eyas.training.objective_options import OBJECTIVES, ObjectiveOptions
from eyas.training.optimizer import HeadOptimizer
from eyas.training.training_config import TrainingConfig

NUM_LEVELS, LEVEL_DECAY = 3, 0.8
LOSS_IDS = torch.arange(0, 64, 2)
AUX_LAYERS = (2, 3, 5)
RATES = {"eagle": 1e-2}  # see `train_options`
ROUNDING = 1e-4  # float32 sums in another order
CASES = {
    "medusa": TrainingConfig("medusa", num_steps=1),
    "medusa-own": TrainingConfig("medusa", num_steps=1, has_own_projection=True),
    "eagle": TrainingConfig("eagle", num_steps=1),
    "eagle3": TrainingConfig("eagle3", num_steps=1),
    "mtp": TrainingConfig("mtp", num_steps=1),
}
FROZEN = {
    "medusa": {"output.weight"},
    "medusa-own": set(),
    "eagle": {"embedding", "output.weight"},
    "eagle3": {"embedding"},
    "mtp": {"embedding", "output.weight"},
}


class Case:
    """A new head of one kind, and what trains it."""

    def __init__(self, name: str, folder: Path, target: DecoderConfig) -> None:
        self.method = training_method(CASES[name], AUX_LAYERS)
        self.output = TargetOutput.load(folder, target, torch.float32)
        weights = NewWeights(folder, target, torch.float32, seed=0)
        self.head: Any = self.method.new_head(weights, LOSS_IDS, NUM_LEVELS)
        self.objective = self.new_objective(self.output)

    def new_objective(self, output: TargetOutput, name: str = "distill") -> Objective:
        options = ObjectiveOptions(name, tree_width=2)
        return Objective(self.method, self.head, output, LOSS_IDS, NUM_LEVELS, LEVEL_DECAY, 0, options)

    @torch.no_grad()
    def level_logits(self, state: Tensor, level: int) -> Tensor:
        """What a drafter would score after one state at a level, the first being 0."""
        if isinstance(self.head, MedusaHead):
            return self.head.logits(state[None], range(level + 1, level + 2)).flatten()
        logits: Tensor = self.head.logits(state[None])[0]
        return logits

    def stir(self) -> None:
        """Move every trained weight off its start, where some are zero, to values that bfloat16 can hold."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in self.head.parameters():
                if weight.requires_grad:
                    noise = 0.1 * torch.randn(weight.shape, generator=generator)
                    weight.copy_((weight + noise).to(torch.bfloat16))


@pytest.fixture(params=sorted(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(name: str, target_folder: Path, target: DecoderConfig) -> Case:
    return Case(name, target_folder, target)


@pytest.fixture
def batch(corpus: Corpus) -> Batch:
    return corpus.batch(corpus.conversations)


def test_gradients_reach_what_is_trained_and_nothing_else(name: str, case: Case, batch: Batch) -> None:
    """Catches weights left out of the computation, and an update of what the head shares with the target."""
    case.stir()
    loss, accuracy = case.objective.compute(batch)
    loss.backward()
    reached = {own for own, weight in case.head.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert reached == {own for own, _ in case.head.named_parameters()} - FROZEN[name]
    assert accuracy.shape == (NUM_LEVELS,)


def test_a_head_may_propose_the_first_ids(target_folder: Path, target: DecoderConfig) -> None:
    """Catches a map of zeros taken for a missing one, where an answer's tokens happen to be the first of all ids."""
    weights = NewWeights(target_folder, target, torch.float32, seed=0)
    head = training_method(CASES["eagle3"], AUX_LAYERS).new_head(weights, torch.arange(8), NUM_LEVELS)
    assert head.candidate_ids.tolist() == list(range(8))


@pytest.mark.parametrize("has_user_turn", [False, True])
def test_the_loss_equals_a_naive_loop(case: Case, batch: Batch, has_user_turn: bool) -> None:
    """Catches a level compared with another one's token, a regression onto another row's feature, ids of the loss that
    are not the head's columns, a level that takes part in the loss with another weight, and tokens of a user, or states
    before them, that are learnt because an answer came before."""
    case.stir()
    if has_user_turn:
        is_answer = batch.is_answer.clone()
        is_answer[7:10] = is_answer[40:42] = False
        batch = dataclasses.replace(batch, is_answer=is_answer)
    ends = torch.tensor(batch.lengths).cumsum(0).sub(1).tolist()
    loss, accuracy = case.objective.compute(batch)
    recorded = batch.features.float()
    inputs = case.method.inputs(recorded, case.output)
    known = case.head.candidate_ids.tolist()
    scored = sorted({*LOSS_IDS.tolist(), *batch.next_ids.tolist()} & set(known))  # the texts' own tokens are, too
    columns = [known.index(token) for token in scored]
    expected = 0.0
    for level, states in enumerate(case.method.level_states(case.head, inputs, batch, NUM_LEVELS)):
        losses, hits, distances = [], [], []
        for state, base in zip(states, batch.rows(level).tolist(), strict=True):
            compared = base + 1 + level  # its distribution is that of the token two rows after the base, at level 0
            if not batch.is_answer[compared if compared in ends else compared + 1]:
                continue
            if isinstance(case.head, EagleHead):
                distances.append((state - inputs[compared]).detach().abs())
            if int(batch.next_ids[compared]) in {-1, *scored}:
                probs = case.output.logits(recorded[compared, -32:])[scored].softmax(0)
                scores = case.level_logits(state, level)[columns]
                losses.append(-float((probs * scores.log_softmax(0)).sum()))
                hits.append(bool(scores.argmax() == probs.argmax()))
        term = sum(losses) / len(losses)
        if distances:
            off = torch.stack(distances)
            term = 0.1 * term + float(torch.where(off < 1, off.square() / 2, off - 0.5).mean())
        expected += LEVEL_DECAY**level * term
        assert float(accuracy[level]) == pytest.approx(sum(hits) / len(hits))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("objective_name", OBJECTIVES)
def test_two_texts_are_learnt_by_heart(name: str, case: Case, corpus: Corpus, objective_name: str) -> None:
    """Catches a start that cannot be left, such as zeros that keep each other at zero, and a gradient of wrong sign.

    The target is made so sure of itself that a perfect head's loss is next to nothing. Only EAGLE-1's keeps its
    distance to features, which are random here.
    """
    norm, weight = case.output.norm.to(torch.bfloat16), case.output.weight.to(torch.bfloat16)
    sure = TargetOutput(norm, 20 * weight, case.output.eps)
    objective = case.new_objective(sure, objective_name)
    batch = corpus.batch(corpus.conversations[:2])
    optimizer = HeadOptimizer(case.head, rate=1e-2, matrix_rate=RATES.get(name, 5e-2), matrix_decay=0.0)
    losses = []
    for _ in range(80):
        loss, accuracy = objective.compute(batch)
        loss.backward()
        optimizer.step(1.0)
        losses.append(float(loss.detach()))
    left, known = (0.15, 0.4) if name == "eagle" else (0.05, 0.9)
    assert losses[-1] < left * losses[0]
    assert float(accuracy.min()) >= known  # guessing one of 32 would give 0.03


def test_the_state_after_the_final_norm_is_what_all_but_eagle3_read(name: str, case: Case, batch: Batch) -> None:
    """Catches a head that is trained on the state before the norm and served the one after it."""
    read = case.method.inputs(batch.features.float(), case.output)
    if name == "eagle3":
        assert torch.equal(read, batch.features.float()[:, :96])
    else:
        last = batch.features.float()[:, 96:]
        normed = last / (last.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * case.output.norm
        torch.testing.assert_close(read, normed)
        assert case.head.capture == (7,)  # six layers, so 6 is the state before the norm


def test_an_exported_head_gives_the_same_logits(
    case: Case, batch: Batch, target_folder: Path, target: DecoderConfig, tmp_path: Path, text_attention: Any
) -> None:
    """Catches tensors exported under another's name, and options of the head that its files do not carry."""
    case.stir()
    case.method.export(case.head, tmp_path / "head")
    loaded = load_head(tmp_path / "head", TargetWeights(target_folder, target), torch.float32, torch.device("cpu"))
    assert type(loaded) is type(case.head)
    assert loaded.capture == case.head.capture
    features = case.method.inputs(batch.features.float(), case.output)[:8]
    expected, actual = (logits_of(head, features, batch.token_ids[1:9], text_attention) for head in (case.head, loaded))
    torch.testing.assert_close(actual, expected, atol=ROUNDING, rtol=ROUNDING)


@torch.no_grad()
def logits_of(head: Any, features: Tensor, token_ids: Tensor, text_attention: Callable[[], Any]) -> Tensor:
    """Scores after every row of a text, and after one more token where the head drafts level by level."""
    plain = text_attention()

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, options: Any = PLAIN_ATTENTION) -> Tensor:
        assert options.scale in (None, query.shape[-1] ** -0.5)  # MTP layers name the one that others leave out
        attended: Tensor = plain(layer, query, key, value)
        return attended

    states = head.extend(features, token_ids, torch.arange(len(token_ids)), attention)
    if isinstance(head, MedusaHead):
        return head.logits(states, range(1, NUM_LEVELS + 1))
    drafted = head.step(states[-1:], token_ids[:1], torch.tensor([len(token_ids)]), attention)
    logits: Tensor = head.logits(torch.cat([states, drafted]))
    return logits
