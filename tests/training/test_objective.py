from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.models.config import DecoderConfig
from eyas.models.eagle3 import Eagle3Head
from eyas.training.batch import Batch
from eyas.training.dataset import Corpus
from eyas.training.eagle3_method import Eagle3Method
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.mtp_method import MtpMethod
from eyas.training.objective import Objective, whole_texts
from eyas.training.objective_options import ObjectiveOptions
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


def is_foretold(batch: Batch, row: int) -> bool:
    """Whether what follows a row is an answer's; a last row's answer was cut off."""
    return bool(batch.is_answer[row if next_token(batch, row) is None else row + 1])


def with_user_turn(batch: Batch) -> Batch:
    """The same texts, whose seventh and eighth tokens a user says."""
    return dataclasses.replace(batch, is_answer=batch.is_answer & ((batch.positions < 6) | (batch.positions > 7)))


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


@pytest.mark.parametrize("has_user_turn", [False, True])
def test_validation_counts_by_hand(corpus: Corpus, head: Eagle3Head, output: TargetOutput, has_user_turn: bool) -> None:
    """Catches draft ids compared with target ids, a favourite sought in the draft vocabulary only, recall that is not
    cumulative, and chains or paths of a tree that go on after a wrong token, or into a user's turn. Two batches, so
    that neither overwrites the other."""
    groups = [corpus.conversations[:2], corpus.conversations[2:]]
    batches = [with_proposed_tokens(corpus.batch(group), head) for group in groups]
    if has_user_turn:
        batches = [with_user_turn(batch) for batch in batches]
    measured = validate(METHOD, head, output, batches, NUM_STEPS)
    hits = torch.zeros(NUM_STEPS, 4)
    totals, num_bases, num_accepted, num_in_tree = [0] * NUM_STEPS, 0, 0, 0
    for batch in batches:
        open_bases: dict[int, int] = {row: row for row in compared_rows(batch, 0) if is_foretold(batch, row)}
        open_in_tree = set(open_bases)
        num_bases += len(open_bases)
        for step, states in enumerate(states_of(head, batch)):
            accepted, accepted_in_tree = {}, set()
            for state, row in zip(states, compared_rows(batch, step), strict=True):
                if not is_foretold(batch, row):
                    continue
                favourite = int(output.logits(batch.features[row, 96:].float()).argmax())
                order = [2 * int(index) for index in head.logits(state).argsort(descending=True)[:4]]
                hits[step] += torch.tensor([favourite in order[: rank + 1] for rank in range(4)])
                totals[step] += 1
                following = next_token(batch, row)
                if row - step in open_bases and order[0] == (favourite if following is None else following):
                    accepted[row - step] = row
                if row - step in open_in_tree and (favourite if following is None else following) in order:
                    accepted_in_tree.add(row - step)
            num_accepted += len(accepted)
            num_in_tree += len(accepted_in_tree)
            open_bases, open_in_tree = accepted, accepted_in_tree
    expected = hits / torch.tensor(totals)[:, None]
    torch.testing.assert_close(torch.tensor(measured.recall), expected)
    assert measured.accuracy == [ranks[0] for ranks in measured.recall]
    assert num_accepted > num_bases / 4
    assert measured.chain_length == pytest.approx(1 + num_accepted / num_bases)
    assert num_in_tree > num_accepted
    assert measured.tree_length == pytest.approx(1 + num_in_tree / num_bases)


def test_sampled_ids_stand_for_all_the_others(
    corpus: Corpus, target: DecoderConfig, target_folder: Path, output: TargetOutput
) -> None:
    """Catches ids sampled twice or from among those always there, a sample that a resumed run would not repeat, and
    sampled ids that weigh less than those they stand for, which a head would then propose too often; and tokens of
    the texts that are left to chance."""
    head = MtpMethod().new_head(NewWeights(target_folder, target, torch.float32, seed=0), DRAFT_IDS, NUM_STEPS)
    batches = [corpus.batch([conversation]) for conversation in corpus.conversations]
    objective = Objective(MtpMethod(), head, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY, num_sampled=8)
    states, totals = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)), []
    for batch in batches:
        columns, bias = objective.scored_columns(batch)
        present = sorted({token for token in batch.next_ids.tolist() if token >= 0 and token % 2})
        sampled = columns[len(DRAFT_IDS) + len(present) :].tolist()
        assert columns[: len(DRAFT_IDS) + len(present)].tolist() == [*DRAFT_IDS.tolist(), *present]
        assert len(set(sampled) - set(present)) == 8
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


def one_of_two_turns(corpus: Corpus, is_first: bool) -> tuple[Batch, Batch]:
    """A text of two answers and a user's turn between them, and the same with one answer masked out."""
    text = corpus.batch(corpus.conversations[:1])
    first, second = torch.zeros(12, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)
    first[3:6], second[8:] = True, True
    both = dataclasses.replace(text, is_answer=first | second, prompt_lengths=[3])
    return both, dataclasses.replace(both, is_answer=first if is_first else second)


def test_a_user_s_turn_between_answers_counts_for_nothing(
    corpus: Corpus, head: Eagle3Head, output: TargetOutput
) -> None:
    """Catches a user's own tokens that a head is measured on, or trained on, because an answer came before them."""
    both, first = one_of_two_turns(corpus, is_first=True)
    _, second = one_of_two_turns(corpus, is_first=False)
    counts, recalls = [], []
    for batch in (both, first, second):
        measured = validate(METHOD, head, output, [batch], 1)
        num_rows = int(batch.precedes_answer[batch.rows(0) + 1].sum())
        counts.append(num_rows)
        recalls.append(torch.tensor(measured.recall[0]) * num_rows)
        assert measured.chain_length - 1 <= measured.tree_length - 1 <= 1.0
    assert counts == [8, 3, 5]  # the last row of a text counts, too: what it foretells was cut off
    torch.testing.assert_close(recalls[0], recalls[1] + recalls[2])
    objective = Objective(METHOD, head, output, DRAFT_IDS, 1, STEP_DECAY)
    objective.compute(both)
    scored = [token is None or token % 2 == 0 for token in (next_token(both, row) for row in [2, 3, 4, *range(7, 12)])]
    assert objective.num_kept == sum(scored)


def test_an_accepted_run_ends_with_its_answer(
    corpus: Corpus, target: DecoderConfig, target_folder: Path, output: TargetOutput
) -> None:
    """Catches runs that go on into a user's turn: of a head that knows every token, 3, 2 and 1 are accepted before the
    end of the first answer, and 3, 3, 3, 2 and 1 of the second."""

    class Perfect(MtpMethod):
        def level_states(self, head: Any, inputs: Tensor, batch: Batch, num_levels: int) -> list[Tensor]:
            favourites = output.logits(batch.features[:, 96:].float()).argmax(dim=1)
            known = torch.where(batch.next_ids < 0, favourites, batch.next_ids)
            return [torch.eye(64)[known[batch.rows(level) + 1 + level]] for level in range(num_levels)]

        def projection(self, head: Any, level: int) -> Tensor:
            return torch.eye(64)

    both, _ = one_of_two_turns(corpus, is_first=True)
    head = MtpMethod().new_head(NewWeights(target_folder, target, torch.float32, seed=0), DRAFT_IDS, 3)
    measured = validate(Perfect(), head, output, [both], 3)
    assert measured.chain_length == measured.tree_length == pytest.approx(1 + (3 + 2 + 1 + 3 + 3 + 3 + 2 + 1) / 8)


@pytest.mark.parametrize("name", ["distill", "hard", "tree"])
def test_every_objective_compares_the_rows_it_should(
    corpus: Corpus, head: Eagle3Head, output: TargetOutput, name: str
) -> None:
    """Catches an option that reaches no loss, a text's token taken one row off, a favourite over other ids than the
    scored ones, and a last row, whose token is unknown, that is trained towards some id."""
    batch = corpus.batch(corpus.conversations)
    options = ObjectiveOptions(name, tree_width=3, tree_share=0.25)
    loss, accuracy = Objective(METHOD, head, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY, 0, options).compute(batch)
    expected = 0.0
    for step, states in enumerate(states_of(head, batch)):
        losses, hits = [], []
        for state, row in zip(states, compared_rows(batch, step), strict=True):
            following = next_token(batch, row)
            probs = output.logits(batch.features[row, 96:].float())[::2].softmax(0)
            scores = head.logits(state).detach()
            favourite = int(probs.argmax())
            if (following is None and name == "hard") or (following is not None and following % 2):
                continue
            soft = -float((probs * scores.log_softmax(0)).sum())
            rivals = scores[torch.arange(32) != favourite].sort(descending=True).values[2:]
            top = float((rivals - scores[favourite]).exp().sum().log1p())
            if name == "hard":
                assert following is not None
                favourite = following // 2
                losses.append(-float(scores.log_softmax(0)[favourite]))
            else:
                losses.append(soft if name == "distill" else 0.75 * soft + 0.25 * top)
            hits.append(int(scores.argmax()) == favourite)
        expected += STEP_DECAY**step * sum(losses) / len(losses)
        assert float(accuracy[step]) == pytest.approx(sum(hits) / len(hits))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["distill", "hard", "tree"])
def test_a_sampled_id_weighs_for_those_it_stands_for(
    corpus: Corpus, target: DecoderConfig, target_folder: Path, output: TargetOutput, name: str
) -> None:
    """Catches an objective that counts sampled ids once, or counts them on one side of the comparison only."""
    method, batch = MtpMethod(), corpus.batch(corpus.conversations)
    head = method.new_head(NewWeights(target_folder, target, torch.float32, seed=0), DRAFT_IDS, 1)
    options = ObjectiveOptions(name, tree_width=3, tree_share=0.25)
    objective = Objective(method, head, output, DRAFT_IDS, 1, STEP_DECAY, 2, options)
    columns, bias = objective.scored_columns(batch)
    assert float(bias.max()) > 1.0
    column_of = {token: column for column, token in enumerate(columns.tolist())}
    inputs = method.inputs(batch.features.float(), output)
    losses = []
    for state, row in zip(training_time_test(head, inputs, batch, 1)[0], compared_rows(batch, 0), strict=True):
        following = next_token(batch, row)
        if following is None and name == "hard":
            continue
        true_scores = output.logits(batch.features[row, 96:].float())[columns]
        scores = head.logits(state[None])[0, columns].detach()
        weighed, probs = scores + bias, (true_scores + bias).softmax(0)
        is_rival = torch.arange(columns.shape[0]) != true_scores.argmax()
        order = scores[is_rival].argsort(descending=True)[2:]
        top = (weighed[is_rival][order] - weighed[true_scores.argmax()]).exp().sum().log1p()
        soft = -(probs * weighed.log_softmax(0)).sum()
        if following is not None and name == "hard":
            losses.append(float(-weighed.log_softmax(0)[column_of[following]]))
        else:
            losses.append(float(soft if name == "distill" else 0.75 * soft + 0.25 * top))
    assert float(objective.compute(batch)[0].detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("name", ["distill", "hard", "tree"])
def test_all_rows_are_those_of_a_text_without_a_prompt(
    corpus: Corpus, head: Eagle3Head, output: TargetOutput, name: str
) -> None:
    """Catches prompt rows that stay out of the loss, and an option that changes the rows of others."""
    batch = corpus.batch(corpus.conversations)
    losses, counts = {}, {}
    for rows, texts in [("answers", batch), ("all", batch), ("answers", whole_texts(batch))]:
        options = ObjectiveOptions(name, loss_rows=rows)
        objective = Objective(METHOD, head, output, torch.arange(0, 64, 2), NUM_STEPS, STEP_DECAY, 0, options)
        loss, _ = objective.compute(texts)
        losses[rows, texts is batch], counts[rows, texts is batch] = loss, objective.num_kept
    assert torch.equal(losses["all", True], losses["answers", False])
    assert counts["all", True] > counts["answers", True]
    unknown = len(batch.lengths) if name == "hard" else 0
    targets = [next_token(batch, row) for row in range(sum(batch.lengths))]
    firsts = {sum(batch.lengths[:index]) for index in range(len(batch.lengths))}
    scored = [token for row, token in enumerate(targets) if row not in firsts and (token is None or token % 2 == 0)]
    assert counts["all", True] == len(scored) - unknown


def test_noise_is_on_what_the_head_reads_only(corpus: Corpus, head: Eagle3Head, output: TargetOutput) -> None:
    """Catches a target's distribution or a next feature that is noisy, noise that no step changes, or that a run
    without it has."""
    batch = corpus.batch(corpus.conversations)
    seen: list[Tensor] = []

    class Spy(Eagle3Method):
        def level_states(self, head: Eagle3Head, inputs: Tensor, batch: Batch, num_levels: int) -> list[Tensor]:
            seen.append(inputs)
            rows = batch.rows(0)
            return [batch.features.float()[rows, :32]]  # whatever was read, the states are the same

        def state_loss(self, states: Tensor, following: Tensor) -> Tensor:
            return following.square().mean()

    losses = []
    for noise, seed, step in [(0.0, 0, 0), (0.1, 0, 0), (0.1, 0, 0), (0.1, 0, 1), (0.1, 1, 0)]:
        options = ObjectiveOptions(feature_noise=noise, seed=seed)
        objective = Objective(Spy((2, 3, 5)), head, output, DRAFT_IDS, 1, STEP_DECAY, 0, options)
        losses.append(float(objective.compute(batch, step)[0].detach()))
    assert len(set(losses)) == 1
    assert torch.equal(seen[0], batch.features.float()[:, :96])
    assert torch.equal(seen[1], seen[2])
    assert all(not torch.equal(seen[1], other) for other in (seen[0], seen[3], seen[4]))


class HostBatch(Batch):
    """A batch whose own index tensors are made where they always are."""

    def rows(self, step: int) -> Tensor:
        with torch.device("cpu"):
            return super().rows(step)

    def later_rows(self, step: int) -> Tensor:
        with torch.device("cpu"):
            return super().later_rows(step)


@pytest.mark.parametrize("name", ["distill", "hard", "tree"])
def test_tensors_are_made_where_the_batch_is(
    corpus: Corpus, head: Eagle3Head, output: TargetOutput, name: str, target: DecoderConfig, target_folder: Path
) -> None:
    """Catches a tensor made on the default device, which is the CPU when head and batch are on a GPU: here the default
    is a device that mixes with no other."""
    plain = corpus.batch(corpus.conversations)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    batch = HostBatch(**fields)
    mtp = MtpMethod().new_head(NewWeights(target_folder, target, torch.float32, seed=0), DRAFT_IDS, NUM_STEPS)
    assert batch.positions.shape == batch.next_ids.shape == batch.precedes_answer.shape  # computed once, and kept
    options = ObjectiveOptions(name, feature_noise=0.1)
    with torch.device("meta"):
        for method, drafter in [(METHOD, head), (MtpMethod(), mtp)]:
            objective = Objective(method, drafter, output, DRAFT_IDS, NUM_STEPS, STEP_DECAY, 8, options)
            loss, accuracy = objective.compute(batch)
            assert loss.device == accuracy.device == batch.token_ids.device
            validate(method, drafter, output, [batch], NUM_STEPS)
