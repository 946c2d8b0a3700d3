from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.deployments.inspection import inspect_path
from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.candidate_projection import DOWN, UP
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleHead
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head import Candidates
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import load_head
from eyas.models.target_weights import TargetWeights
from eyas.training.candidate_config import CandidateConfig
from eyas.training.candidate_factors import CandidateFactors
from eyas.training.candidate_head import FrozenHead
from eyas.training.candidate_trainer import CandidateTrainer
from eyas.training.eagle3_method import Eagle3Method
from eyas.training.eagle_method import EagleMethod
from eyas.training.initialisation import NewWeights, TargetOutput
from eyas.training.medusa_method import MedusaMethod
from eyas.training.shard import Shard, save_shard
from eyas.training.training_log import StepRecord, read_log
from eyas.training.ttt import training_time_test

CPU = torch.device("cpu")
AUX_LAYERS, STOP, DRAFT_VOCAB, VOCAB = (2, 3, 5), 2, 40, 64
LENGTHS, PROMPT_LENGTHS = [12, 9, 14, 10, 11, 13], [4, 3, 6, 2, 5, 3]  # of the conversations of `shard`
CONFIG = CandidateConfig(
    head="",
    rank=4,
    num_candidates=6,
    num_steps=12,
    tokens_per_batch=30,
    learning_rate=3e-3,
    warmup_steps=2,
    validation_share=0.2,
    checkpoint_minutes=60.0,
    dtype="float32",
)
Load = Callable[[Path], "EagleHead | Eagle3Head"]


class Recorder:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord, num_steps: int | None) -> None:
        self.records.append(record)

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]


@pytest.fixture(scope="module")
def heads(target_folder: Path, target: DecoderConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One head of some kinds, as it is exported."""
    root = tmp_path_factory.mktemp("heads")
    weights = NewWeights(target_folder, target, torch.float32, 0)
    token_ids = torch.arange(VOCAB)[VOCAB - DRAFT_VOCAB :]
    for name, method, ids in (
        ("eagle3", Eagle3Method(AUX_LAYERS), token_ids),
        ("eagle3 over all ids", Eagle3Method(AUX_LAYERS), torch.arange(VOCAB)),
        ("eagle", EagleMethod(), torch.arange(VOCAB)),
        ("medusa", MedusaMethod(has_own_projection=False), torch.arange(VOCAB)),
    ):
        method.export(method.new_head(weights, ids, 3), root / name)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture
def changed_head(heads: dict[str, Path], tmp_path: Path) -> Any:
    """Writes the EAGLE-3 head with other fields in its config."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir()
        config = json.loads((heads["eagle3"] / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        save_file(load_file(heads["eagle3"] / "model.safetensors"), folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def corpus_folder(shard: Shard, tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    save_shard(shard, folder / "shard-00000.safetensors")
    return folder


@pytest.fixture
def make_trainer(target_folder: Path, heads: dict[str, Path], corpus_folder: Path, tmp_path: Path) -> Any:
    def make(
        work: str = "work", head: str | Path = "eagle3", aux_layers: tuple[int, ...] = AUX_LAYERS, **changes: Any
    ) -> CandidateTrainer:
        path = heads[head] if isinstance(head, str) else head
        config = dataclasses.replace(CONFIG, head=str(path), **changes)
        frozen = FrozenHead(path, target_folder, config.compute_dtype, aux_layers)
        return CandidateTrainer(config, frozen, [corpus_folder], tmp_path / work, STOP)

    return make


@pytest.fixture
def load(target_folder: Path, target: DecoderConfig) -> Load:
    def load(folder: Path) -> EagleHead | Eagle3Head:
        head = load_head(folder, TargetWeights(target_folder, target), torch.float32, CPU)
        assert isinstance(head, EagleHead | Eagle3Head)
        return head

    return load


@pytest.mark.parametrize(("head", "dtype"), [("eagle3", "bfloat16"), ("eagle3 over all ids", "float32"),
                                             ("eagle", "float32")])  # fmt: skip
def test_factors_learn_what_the_head_proposes(
    make_trainer: Any, shard: Shard, corpus_folder: Path, head: str, dtype: str
) -> None:
    """Catches gradients that miss the factors, updates that do not reach the computation, and a wrong target.

    The texts to validate on are those that are learnt but for the first token of each prompt.
    """
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    token_ids = shard.token_ids.clone()
    token_ids[starts] = (token_ids[starts] + 1) % VOCAB
    save_shard(dataclasses.replace(shard, token_ids=token_ids), corpus_folder / "shard-00001.safetensors")
    changes = {"num_steps": 60, "learning_rate": 1e-2, "validation_share": 0.5}
    trainer, recorder = make_trainer(head=head, dtype=dtype, **changes), Recorder()
    after = trainer.run(recorder)
    before = trainer.before
    assert statistics.mean(recorder.losses[-10:]) < 0.7 * statistics.mean(recorder.losses[:3])
    assert all(new < 0.8 * old for new, old in zip(after.divergence, before.divergence, strict=True))
    assert all(new >= old for new, old in zip(after.recall, before.recall, strict=True))
    assert sum(after.recall) > sum(before.recall) + 0.1
    assert all(weight.dtype == torch.float32 for weight in trainer.factors.parameters())


def test_only_answers_are_measured(make_trainer: Any, shard: Shard, corpus_folder: Path) -> None:
    """Catches rows of later user turns counted in, where nothing is drafted, and states of one level or row compared
    with the distribution of another."""
    is_answer = shard.is_answer.clone()
    is_answer[-4:-2] = False  # a user turn in the last conversation
    save_shard(dataclasses.replace(shard, is_answer=is_answer), corpus_folder / "shard-00000.safetensors")
    trainer = make_trainer(num_levels=2)
    last = trainer.corpus.batch(trainer.corpus.conversations[-1:])
    found, first = trainer.validate(), PROMPT_LENGTHS[-1] - 2
    for level, states in enumerate(trainer.head.scored_states(last, 2)):
        bases = range(first, first + states.shape[0])
        kept = states[[bool(last.is_answer[min(base + 2 + level, LENGTHS[-1] - 1)]) for base in bases]]
        assert kept.shape[0] == states.shape[0] - 2
        low = kept @ trainer.factors.down.T @ trainer.factors.up.T
        full = kept @ trainer.head.output.T
        rows = F.kl_div(low.log_softmax(-1), full.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        assert found.divergence[level] == pytest.approx(rows.mean().item(), rel=1e-4)
        recalled = (low.topk(CONFIG.num_candidates).indices == full.argmax(-1, keepdim=True)).any(-1)
        assert found.recall[level] == pytest.approx(recalled.float().mean().item())


def test_later_levels_count_less(make_trainer: Any) -> None:
    """Catches levels that all weigh alike, or a decay that misses one."""

    def first_loss(level_decay: float) -> float:
        trainer, recorder = make_trainer(str(level_decay), level_decay=level_decay), Recorder()
        trainer.run(recorder, stop_after=1)
        return recorder.losses[0]

    first, both_halved, both = (first_loss(level_decay) for level_decay in (1e-9, 0.5, 1.0))
    second, third = 4 * (both_halved - first) - (both - first), 2 * (both - first) - 4 * (both_halved - first)
    assert min(second, third) > 0.1
    quarter = first_loss(0.25)
    assert quarter == pytest.approx(first + second / 4 + third / 16, rel=1e-4)


def test_the_rate_rises(make_trainer: Any) -> None:
    """Catches steps of full size from the first one on: that of AdamW is as long as the rate."""
    trainer = make_trainer(warmup_steps=2)
    start = trainer.factors.up.detach().clone()
    trainer.run(Recorder(), stop_after=1)
    step = float((trainer.factors.up.detach() - start).abs().max())
    assert step == pytest.approx(0.5 * CONFIG.learning_rate, rel=0.01)


@pytest.mark.parametrize("head", ["eagle", "eagle3 on the final state"])
def test_the_final_state_is_normed(
    make_trainer: Any, heads: dict[str, Path], target_folder: Path, target: DecoderConfig, tmp_path: Path, head: str
) -> None:
    """Catches the recorded state handed to the head as it is, where the target gives it normed."""
    folder = heads["eagle"]
    if head != "eagle":
        folder = tmp_path / "head"
        folder.mkdir()
        tensors = load_file(heads["eagle3"] / "model.safetensors")
        del tensors["fc.weight"]
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((heads["eagle3"] / "config.json").read_text())
        config["eagle_config"] = {"use_aux_hidden_state": False}
        (folder / "config.json").write_text(json.dumps(config))
    trainer = make_trainer(head=folder)
    batch = trainer.corpus.batch(trainer.corpus.conversations[:2])
    output = TargetOutput.load(target_folder, target, torch.float32)
    last = batch.features.float()[:, -target.hidden_size :]
    states = training_time_test(trainer.head.head, output.normed(last), batch, 2)
    found = trainer.head.scored_states(batch, 2)
    assert len(found) == 2
    assert all(torch.equal(x, trainer.head.head.scored(y)) for x, y in zip(found, states, strict=True))


def test_scaled_logits_are_compared(make_trainer: Any, heads: dict[str, Path], tmp_path: Path) -> None:
    """Catches a head's logit scale left out, which would change the distribution the factors learn."""
    tensors = load_file(heads["eagle3"] / "model.safetensors")
    config = json.loads((heads["eagle3"] / "config.json").read_text())
    for name, scale, rows in (("scale", {"logit_scale": 0.25}, 1.0), ("rows", {}, 0.25)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | scale))
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * rows}, tmp_path / name / "model.safetensors")
    found, expected = (make_trainer(name, head=tmp_path / name).validate() for name in ("scale", "rows"))
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-4)
    assert found.recall == expected.recall


@pytest.mark.parametrize("kill_after", [1, 7])
def test_a_killed_run_repeats_the_losses(
    make_trainer: Any, corpus_folder: Path, shard: Shard, tmp_path: Path, kill_after: int
) -> None:
    """Catches factors, optimiser, rate, batch order or corpus that are not restored exactly, and a log with doubled
    steps. The corpus grows between kill and resume, which must not change the batches."""
    whole, killed, resumed = Recorder(), Recorder(), Recorder()
    expected = make_trainer("whole").run(whole)
    assert make_trainer("work", checkpoint_minutes=1e-9).run(killed, stop_after=kill_after) is None
    save_shard(shard, corpus_folder / "shard-00001.safetensors")
    trainer = make_trainer("work")
    assert trainer.run(resumed) == expected
    first = 12 - len(resumed.losses)
    assert first == kill_after - 1  # the checkpoint after the last step was not reached
    assert killed.losses[:first] + resumed.losses == whole.losses
    assert [record.loss for record in read_log(tmp_path / "work" / "log.jsonl")] == whole.losses
    assert trainer.before != expected
    again = make_trainer("work")
    assert again.before == trainer.before
    assert all(torch.equal(x, y) for x, y in zip(again.factors.parameters(), trainer.factors.parameters(), strict=True))


def test_other_settings_do_not_resume(make_trainer: Any) -> None:
    """Catches a run that silently goes on with another rank, or for another head, than it was begun with."""
    make_trainer(num_steps=1).run(Recorder())
    with pytest.raises(ValueError, match="rank = 4, now it is 5"):
        make_trainer(num_steps=1, rank=5)
    with pytest.raises(ValueError, match="head = .*eagle3, now it is .*eagle;"):
        make_trainer(num_steps=1, head="eagle")


def test_another_corpus_does_not_resume(make_trainer: Any, corpus_folder: Path) -> None:
    """Catches a run that goes on with other batches than it was begun with."""
    make_trainer(num_steps=1).run(Recorder())
    (corpus_folder / "shard-00000.safetensors").rename(corpus_folder / "shard-00001.safetensors")
    with pytest.raises(ValueError, match="--corpus: the run was begun with .*shard-00000.safetensors, too"):
        make_trainer(num_steps=1)


def test_minutes_become_a_number_of_steps(make_trainer: Any) -> None:
    """Catches a budget that is never turned into steps, so that the rate never falls."""
    trainer, recorder = make_trainer(num_steps=None, max_minutes=0.01), Recorder()
    trainer.run(recorder)
    assert trainer.loop.num_steps == len(recorder.records) >= 20


def test_a_loss_that_is_not_finite_ends_the_run(make_trainer: Any) -> None:
    """Catches hours of training on after the factors have become NaN."""
    trainer = make_trainer()
    torch.nn.init.constant_(trainer.factors.up, float("nan"))
    with pytest.raises(ValueError, match="learning_rate: the loss is nan at step 0; lower"):
        trainer.run(Recorder())


@pytest.mark.parametrize("head", ["eagle3", "eagle"])
def test_the_head_is_written_as_it_was_with_the_factors(
    make_trainer: Any, heads: dict[str, Path], load: Load, target_folder: Path, tmp_path: Path, head: str
) -> None:
    """Catches a tensor of the head that is lost or changed, factors rounded twice or swapped, or an m not told."""
    trainer = make_trainer(head=head)
    trainer.run(Recorder())
    trainer.export(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (heads[head], tmp_path / "out"))
    factors = {UP: trainer.factors.up.detach().bfloat16(), DOWN: trainer.factors.down.detach().bfloat16()}
    assert after.keys() == before.keys() | factors.keys()
    for name, tensor in (before | factors).items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((heads[head] / "config.json").read_text()) | {"num_candidates": 6}
    projection = load(tmp_path / "out").projection
    assert projection is not None
    assert projection.num_candidates == 6
    assert torch.equal(projection.up.weight, factors[UP].float())
    assert inspect_path(tmp_path / "out", target_folder, HeadOptions()).problems == []


def test_what_the_head_has_of_its_own_is_kept(
    make_trainer: Any, heads: dict[str, Path], load: Load, target_folder: Path, tmp_path: Path
) -> None:
    """Catches a head with an embedding and factors already, as EAGLE-4 exports have, written without the one or with
    the old others: it would draft from the target's embedding. Also an acceptance prior kept that is for other scores.
    """
    tensors = load_file(heads["eagle3"] / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 32).bfloat16()
    tensors |= {UP: torch.zeros(DRAFT_VOCAB, 9).bfloat16(), DOWN: torch.zeros(9, 32).bfloat16()}
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "model.safetensors")
    config = json.loads((heads["eagle3"] / "config.json").read_text())
    prior = AcceptancePrior(torch.tensor([-1.0, 0.0]), None, None).as_json()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config | {"acceptance_prior": prior, "num_candidates": 9}))
    trainer = make_trainer(head=tmp_path / "own", num_steps=1)
    assert trainer.head.has_prior
    trainer.run(Recorder())
    trainer.export(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], tensors["embed_tokens.weight"])
    assert written[DOWN].shape == (4, 32)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"num_candidates": 6}


def test_drafting_finds_what_was_measured(
    make_trainer: Any, load: Load, heads: dict[str, Path], tmp_path: Path
) -> None:
    """Catches a recall that is not what the drafter's own retrieval has: first tokens lost there must be those here."""
    trainer = make_trainer(num_steps=1, num_candidates=4, rank=2)
    trainer.run(Recorder())
    trainer.export(tmp_path / "out")
    full, low = load(heads["eagle3"]), load(tmp_path / "out")
    states = torch.randn(50, 32, generator=torch.Generator().manual_seed(5))
    assert low.projection is not None
    factors = CandidateFactors(low.projection.down.weight, low.projection.up.weight)
    scored = low.scored(states)
    _, recalled = factors.divergence(scored, full.output.weight, torch.ones(50), 4)
    ranker = _BestFirst()
    expected, found = (head.candidates(states, range(1, 2), ranker).tokens[:, 0] for head in (full, low))
    assert torch.equal(found == expected, recalled)
    assert 0 < int(recalled.sum()) < 50


class _BestFirst:
    """A `Ranker` at temperature 0."""

    def rank(self, logits: Tensor, token_ids: Tensor) -> Candidates:
        best, columns = logits.topk(1, dim=-1)
        return Candidates(token_ids[columns] if token_ids.dim() == 1 else token_ids.gather(1, columns), best)

    def shortlist(self, logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
        return logits.topk(count, dim=-1).indices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank: must be at least 1, got 0"),
        ({"rank": 32}, "rank: must be from 1 to 31 .* got 32"),
        ({"num_candidates": 0}, "num_candidates: must be at least 1, got 0"),
        ({"num_candidates": DRAFT_VOCAB}, "num_candidates: must be below the 40 tokens the head scores, got 40"),
        ({"head": "medusa"}, "head: .*medusa is of kind medusa, which has no place for"),
        ({"aux_layers": (2, 3, 4)}, r"reads the target's states \(2, 3, 5\), a corpus holds \(2, 3, 4, 6\)"),
        (
            {"aux_layers": (2, 3, 4, 5)},
            r"--corpus: .*shard-00000.safetensors: states are 128 wide, .*\(2, 3, 4, 5, 6\) are 160",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make_trainer: Any, changes: dict[str, Any], message: str) -> None:
    """Catches a run that fails late, or trains on states of other layers than the head reads."""
    with pytest.raises(ValueError, match=message):
        make_trainer(**changes)


def test_a_head_of_another_target_is_refused(make_trainer: Any, changed_head: Any) -> None:
    """Catches factors trained on the states of a model that the head was not made for."""
    with pytest.raises(ValueError, match="vocab_size: the head was made for 65, the target has 64"):
        make_trainer(head=changed_head(vocab_size=65))


def test_a_window_is_kept(make_trainer: Any, changed_head: Any, load: Load, tmp_path: Path) -> None:
    """Catches states of full attention for a head with a window, and a window that is not written."""
    folder = changed_head(sliding_window=2)
    trainer, full = make_trainer(head=folder, num_steps=1), make_trainer("full")
    trainer.run(Recorder())
    trainer.export(tmp_path / "out")
    assert load(tmp_path / "out").config.layers.windows == (2,)
    assert trainer.before != full.validate()


def test_missing_states_are_computed(
    target_folder: Path, heads: dict[str, Path], shard: Shard, corpus_folder: Path, tmp_path: Path
) -> None:
    """Catches a corpus of texts alone that cannot be trained on, or other rows' states."""
    features = shard.features
    assert features is not None
    frozen = FrozenHead(heads["eagle3"], target_folder, torch.float32, AUX_LAYERS)
    config = dataclasses.replace(CONFIG, head=str(heads["eagle3"]))
    recorded = CandidateTrainer(config, frozen, [corpus_folder], tmp_path / "recorded", STOP)
    rows = {tuple(ids.tolist()): states for ids, states in zip(
        shard.token_ids.split(LENGTHS), features.split(LENGTHS), strict=True)}  # fmt: skip

    def compute(token_ids: Tensor, lengths: list[int]) -> Tensor:
        return torch.cat([rows[tuple(ids.tolist())] for ids in token_ids.split(lengths)])

    save_shard(dataclasses.replace(shard, features=None), corpus_folder / "shard-00000.safetensors")
    computed = CandidateTrainer(config, frozen, [corpus_folder], tmp_path / "computed", STOP, compute)
    assert computed.validate() == recorded.validate()
    with pytest.raises(ValueError, match="without the target's states; compute them with --states online"):
        CandidateTrainer(config, frozen, [corpus_folder], tmp_path / "neither", STOP)


def test_a_place_that_is_taken_is_refused(make_trainer: Any, tmp_path: Path) -> None:
    """Catches a folder found to hold something after hours of training."""
    trainer = make_trainer()
    trainer.head.check_export(tmp_path / "out")
    (tmp_path / "out").mkdir()
    trainer.head.check_export(tmp_path / "out")
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ValueError, match="out exists and is not an empty folder"):
        trainer.head.check_export(tmp_path / "out")
