from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.training.dataset import Batch, Corpus
from eyas.training.eagle3_method import Eagle3Method
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.mtp_method import MtpMethod
from eyas.training.objective import Objective
from eyas.training.ttt import training_time_test
from eyas.training.validation import validate

NUM_STEPS, STEP_DECAY = 3, 0.5
DRAFT_IDS = torch.arange(0, 64, 2)
METHOD = Eagle3Method((2, 3, 5))


@pytest.fixture
def head(new_eagle3: Callable[..., Eagle3Head]) -> Eagle3Head:
    return new_eagle3(DRAFT_IDS)


@pytest.fixture
def output(target: DecoderConfig, target_folder: Path) -> TargetOutput:
    return TargetOutput.load(target_folder, target, torch.float32)


def compared_rows(batch: Batch, step: int) -> list[int]:
    """Flat row whose target distribution each base of `step` is compared with, walked one conversation at a time."""
    rows, offset = [], 0
    for length, prompt_length in zip(batch.lengths, batch.prompt_lengths, strict=True):
        rows += [offset + base + 1 + step for base in range(prompt_length - 2, length) if base + 1 + step < length]
        offset += length
    return rows


def next_token(batch: Batch, row: int) -> int | None:
    ends = [sum(batch.lengths[: index + 1]) - 1 for index in range(len(batch.lengths))]
    return None if row in ends else int(batch.token_ids[row + 1])


def states_of(head: Eagle3Head, batch: Batch) -> list[Tensor]:
    return training_time_test(head, batch.features.float()[:, :96], batch, NUM_STEPS)


def with_proposed_tokens(batch: Batch, head: Eagle3Head) -> Batch:
    """The same texts with most answer tokens replaced, in order, by the head's own proposals: some chains get long."""
    for position in range(max(batch.lengths)):
        if position % 4:
            proposed = head.candidate_ids[head.logits(states_of(head, batch)[0]).argmax(dim=1)]
            rows = batch.rows(0)
            chosen = (batch.positions[rows] == position) & (batch.next_ids[rows + 1] >= 0)
            token_ids = batch.token_ids.clone()
            token_ids[rows[chosen] + 2] = proposed[chosen]
            batch = dataclasses.replace(batch, token_ids=token_ids)
    return batch


def test_loss_equals_a_naive_loop(corpus: Corpus, head: Eagle3Head, output: TargetOutput) -> None:
    """Catches a target taken one row off, a softmax over the whole vocabulary, kept rows that emitted an id the head
    cannot propose, and steps that all weigh the same."""
    batch = corpus.batch(corpus.conversations)
    loss, accuracy = Objective(METHOD, head, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY).compute(batch)
    expected = 0.0
    for step, states in enumerate(states_of(head, batch)):
        losses, hits = [], []
        for state, row in zip(states, compared_rows(batch, step), strict=True):
            following = next_token(batch, row)
            if following is None or following % 2 == 0:
                probs = output.logits(batch.features[row, 96:].float())[::2].softmax(0)
                scores = head.logits(state)
                losses.append(-float((probs * scores.log_softmax(0)).sum().detach()))
                hits.append(bool(scores.argmax() == probs.argmax()))
        expected += STEP_DECAY**step * sum(losses) / len(losses)
        assert float(accuracy[step]) == pytest.approx(sum(hits) / len(hits))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_gradients_arrive_in_float32(
    corpus: Corpus, head: Eagle3Head, target_folder: Path, target: DecoderConfig
) -> None:
    """Catches gradients that stay with the bfloat16 copies, and an embedding that is trained."""
    output = TargetOutput.load(target_folder, target, torch.bfloat16)
    loss, _ = Objective(METHOD, head, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY).compute(
        corpus.batch(corpus.conversations)
    )
    loss.backward()
    assert [name for name, weight in head.named_parameters() if weight.grad is None] == ["embedding"]
    assert all(weight.grad.dtype == torch.float32 for weight in head.parameters() if weight.grad is not None)


def test_validation_counts_by_hand(corpus: Corpus, head: Eagle3Head, output: TargetOutput) -> None:
    """Catches draft ids compared with target ids, a favourite sought in the draft vocabulary only, recall that is not
    cumulative, and chains that go on after a wrong token. Two batches, so that neither overwrites the other."""
    groups = [corpus.conversations[:2], corpus.conversations[2:]]
    batches = [with_proposed_tokens(corpus.batch(group), head) for group in groups]
    measured = validate(METHOD, head, output, batches, NUM_STEPS)
    hits = torch.zeros(NUM_STEPS, 4)
    totals, num_bases, num_accepted = [0] * NUM_STEPS, 0, 0
    for batch in batches:
        open_bases: dict[int, int] = {row: row for row in compared_rows(batch, 0)}
        num_bases += len(open_bases)
        for step, states in enumerate(states_of(head, batch)):
            accepted = {}
            for state, row in zip(states, compared_rows(batch, step), strict=True):
                favourite = int(output.logits(batch.features[row, 96:].float()).argmax())
                order = [2 * int(index) for index in head.logits(state).argsort(descending=True)[:4]]
                hits[step] += torch.tensor([favourite in order[: rank + 1] for rank in range(4)])
                totals[step] += 1
                following = next_token(batch, row)
                if row - step in open_bases and order[0] == (favourite if following is None else following):
                    accepted[row - step] = row
            num_accepted += len(accepted)
            open_bases = accepted
    expected = hits / torch.tensor(totals)[:, None]
    torch.testing.assert_close(torch.tensor(measured.recall), expected)
    assert measured.accuracy == [ranks[0] for ranks in measured.recall]
    assert num_accepted > num_bases / 4
    assert measured.chain_length == pytest.approx(1 + num_accepted / num_bases)


def test_sampled_ids_stand_for_all_the_others(
    corpus: Corpus, target: DecoderConfig, target_folder: Path, output: TargetOutput
) -> None:
    """Catches ids sampled twice or from among those always there, a sample that a resumed run would not repeat, and
    sampled ids that weigh less than those they stand for, which a head would then propose too often."""
    head = MtpMethod().new_head(NewWeights(target_folder, target, torch.float32, seed=0), DRAFT_IDS, NUM_STEPS)
    batches = [corpus.batch([conversation]) for conversation in corpus.conversations]
    objective = Objective(MtpMethod(), head, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY, num_sampled=8)
    states, totals = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)), []
    for batch in batches:
        columns, bias = objective.scored_columns(batch)
        sampled = columns[len(DRAFT_IDS) :].tolist()
        assert columns[: len(DRAFT_IDS)].tolist() == DRAFT_IDS.tolist()
        assert len(set(sampled)) == 8
        assert all(token % 2 for token in sampled)
        assert torch.equal(columns, objective.scored_columns(batch)[0])
        totals.append((output.restricted(columns).logits(states) + bias).exp().sum(1))
    assert len({tuple(objective.scored_columns(batch)[0].tolist()) for batch in batches}) == len(batches)
    whole = output.logits(states).exp().sum(1)
    assert (torch.stack(totals).mean(0) / whole).log().abs().mean() < 0.5  # four times the ids: log 4 would be missing


@pytest.mark.parametrize("num_sampled", [32, 500])
def test_a_sample_of_all_the_others_is_the_whole_vocabulary(
    corpus: Corpus, target: DecoderConfig, target_folder: Path, output: TargetOutput, num_sampled: int
) -> None:
    """Catches rows of the output projection taken in the order of the vocabulary where the sample has another."""
    head = MtpMethod().new_head(NewWeights(target_folder, target, torch.float32, seed=0), DRAFT_IDS, NUM_STEPS)
    batch, everything = corpus.batch(corpus.conversations[:2]), torch.arange(64)
    sampled = Objective(MtpMethod(), head, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY, num_sampled)
    assert torch.equal(sampled.scored_columns(batch)[0], everything)
    assert not sampled.scored_columns(batch)[1].any()
