"""Medusa heads in the drafter: all levels from one state, in trees of every form, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.published_trees import named_tree
from eyas.kernels.static_tree import TreeChoices
from eyas.models.head_loading import load_head
from eyas.models.medusa import MedusaHead
from eyas.models.target_weights import TargetWeights
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.loading import EngineSpec, load_drafter, load_target
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.workers.conftest import Generation, Job, Models

LAYOUT = PoolLayout(num_pages=48, page_size=16)
NUM_HEADS, HIDDEN, VOCAB_SIZE = 3, 32, 61
SHAPES = {
    "chain": TreeShape(4, 3, 1),
    "dynamic": TreeShape(12, 3, 4),
    "dynamic, one level": TreeShape(4, 1, 4),
    "cartesian": TreeShape.fixed(TreeChoices.cartesian([3, 2, 1])),
    "sparse": TreeShape.fixed(TreeChoices.of([(0,), (2,), (0, 3), (0, 0), (2, 1), (0, 0, 5)])),
    "one node": TreeShape.fixed(TreeChoices.cartesian([1])),
    "published, cut to three levels": TreeShape.fixed(named_tree("medusa-63").truncated(3)),
}
SAMPLINGS = {"greedy": SamplingParams(), "T = 1": SamplingParams(temperature=1.0, seed=7)}


@pytest.fixture(scope="module")
def folder(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads whose residual blocks are small, over the target's projection, so that they are sometimes right."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    path = tmp_path_factory.mktemp("medusa")
    save_file(tensors, path / "medusa_lm_head.safetensors")
    return path


@pytest.fixture(scope="module")
def head(models: Models, folder: Path) -> MedusaHead:
    loaded = load_head(
        folder, TargetWeights(models.target_folder, models.target.config), torch.float32, torch.device("cpu")
    )
    assert isinstance(loaded, MedusaHead)
    return loaded


def new_workers(models: Models, head: MedusaHead, shape: TreeShape) -> LocalWorkers:
    target = TargetRunner(models.target, LAYOUT, head.capture)
    return LocalWorkers(target, DraftRunner(head, LAYOUT, choices=shape.choices))


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_tree_writes_the_plain_text(
    shape: str,
    sampling: str,
    models: Models,
    head: MedusaHead,
    jobs: list[Job],
    new_generation: type[Generation],
) -> None:
    """Catches candidates of one level or request handed to another, and rows of a batch in another order."""

    def texts(workers: LocalWorkers, tree: TreeShape) -> list[list[int]]:
        generation = new_generation(workers, tree, max_batch_size=3)
        for job in jobs[:6]:
            generation.submit(type(job)(job.prompt_ids, SAMPLINGS[sampling], job.max_tokens))
        return generation.run()

    plain = texts(LocalWorkers(TargetRunner(models.target, LAYOUT, ()), None), TreeShape())
    workers = new_workers(models, head, SHAPES[shape])
    assert texts(workers, SHAPES[shape]) == plain
    assert isinstance(workers.drafter, DraftRunner)
    assert workers.drafter.pool is None
    assert workers.drafter.num_granted_pages == workers.target.num_granted_pages == 0


@pytest.mark.parametrize(
    "shape", [TreeShape(30, 6, 4), TreeShape.fixed(named_tree("medusa-63"))], ids=["grown", "fixed"]
)
def test_levels_beyond_the_heads_are_cut(
    shape: TreeShape, models: Models, head: MedusaHead, jobs: list[Job], new_generation: type[Generation]
) -> None:
    """Catches a crash, or a head asked twice, where a plan names more levels than there are heads."""
    workers = new_workers(models, head, shape)
    depths: list[int] = []
    draft = workers.drafter.draft

    def note_depths(plan: object) -> dict[int, tuple[list[int], list[int]]]:
        trees = draft(plan)
        for _, parents in trees.values():
            depth = [0]
            for parent in parents[1:]:
                depth.append(depth[parent] + 1)
            depths.append(max(depth))
        return trees

    workers.drafter.draft = note_depths
    generation = new_generation(workers, shape)
    for job in jobs[:4]:
        generation.submit(job)
    generation.run()
    assert max(depths) == NUM_HEADS


@pytest.mark.parametrize("shape", [(9, 3, 3), (9, 4, 3)], ids=["as many levels as heads", "one more"])
def test_too_deep_a_tree_is_refused_at_start(shape: tuple[int, int, int], models: Models, folder: Path) -> None:
    """Catches an engine that silently drafts less than it was asked for."""
    spec = EngineSpec(str(models.target_folder), str(folder), "float32", "cpu", 8, 16, num_threads=1)
    if shape[1] <= NUM_HEADS:
        spec.validate(shape[1])
        assert spec.capture() == (models.target.config.final_index,)
        return
    with pytest.raises(ValueError, match="draft_depth: 4 levels were asked for, but the head has 3 heads"):
        spec.validate(shape[1])


def test_engine_loads_medusa(
    models: Models, folder: Path, jobs: list[Job], plain_texts: list[list[int]], new_generation: type[Generation]
) -> None:
    """Catches a start-up path that knows EAGLE heads only; in bfloat16 heads are packed."""
    choices = TreeChoices.cartesian([3, 2, 1])
    spec = EngineSpec(
        str(models.target_folder), str(folder), "float32", "cpu", 48, 16, num_threads=1, tree_choices=choices.paths
    )
    generation = new_generation(LocalWorkers(load_target(spec), load_drafter(spec)), TreeShape.fixed(choices))
    for job in jobs[:4]:
        generation.submit(job)
    assert generation.run() == plain_texts[:4]


class ForetellingHead(MedusaHead):
    """Reads a known text instead of its weights: features carry the position, level d gives the token d + 1 later."""

    text: list[int]

    def logits(self, states: Tensor, levels: range) -> Tensor:
        positions = states[:, 0].long()[:, None] + torch.tensor(list(levels)) + 1
        known = torch.tensor([*self.text, *[0] * (NUM_HEADS + 2)])
        return torch.nn.functional.one_hot(known[positions.clamp(max=len(known) - 1)], VOCAB_SIZE) * 50.0

    def extend(
        self, features: Tensor, token_ids: Tensor, positions: Tensor, attention: Callable[..., Tensor]
    ) -> Tensor:
        return positions[:, None].float()


def test_head_i_foretells_the_token_i_plus_two_later(
    models: Models, head: MedusaHead, jobs: list[Job], plain_texts: list[list[int]], new_generation: type[Generation]
) -> None:
    """Catches every level one token early or late, where nothing fails and nothing is accepted."""
    foretelling = ForetellingHead(head.config, [*head.blocks], head.output, head.candidate_ids)
    job, text = jobs[0], plain_texts[0]
    foretelling.text = job.prompt_ids + text
    generation = new_generation(new_workers(models, foretelling, TreeShape(4, 3, 1)), TreeShape(4, 3, 1))
    generation.submit(job)
    assert generation.run() == [text]
    accepted = [len(run.tokens) - 1 for run in generation.decode_runs[: (len(text) - 1) // 4]]
    assert accepted == [NUM_HEADS] * len(accepted)
    assert accepted
