"""Every published kind of head in whole generations: the text is the target's, whatever tree the head drafts.

A row of `HEADS` writes a head as it is published. Random heads are hardly ever accepted and would test little, so heads
are made from the target: they pass the newest token's embedding on to the target's output projection, which the target
of these tests nearly follows. Random weights on top keep every part in the result.

Letters: H hidden, V vocabulary, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.static_tree import TreeChoices
from eyas.models.head import DraftHead
from eyas.models.head_files import HeadOptions
from eyas.models.head_loading import load_head, open_head
from eyas.models.target_weights import TargetWeights
from eyas.workers.buckets import GraphLimits
from eyas.workers.draft import DraftRunner
from eyas.workers.graphs import EagerRecorder
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job, Models

STATIC = TreeChoices.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)])
SHAPES = {"chain": TreeShape(6, 5, 1), "dynamic": TreeShape(14, 4, 3), "static": TreeShape.fixed(STATIC)}
HIDDEN, INNER, NUM_HEADS, VOCAB_SIZE, DRAFT_VOCAB_SIZE, NOISE = 32, 40, 4, 61, 55, 0.05
MIN_ACCEPTED = 0.2  # draft tokens a step, over requests of all temperatures; random heads reach 0.08 at most


def target_weights(target: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, final norm and output projection."""
    tensors = load_file(target / "model.safetensors")
    return tensors["model.embed_tokens.weight"], tensors["model.norm.weight"], tensors["lm_head.weight"]


class Noise:
    """Small random tensors, and others with a little of it on top."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def of(self, *shape: int) -> Tensor:
        return NOISE * torch.randn(shape, generator=self._generator)

    def on(self, tensor: Tensor) -> Tensor:
        return tensor + self.of(*tensor.shape)


def ordinary_layer(
    prefix: str, hidden: int, head_rows: int, noise: Noise, has_input_norm: bool = True
) -> dict[str, Tensor]:
    """A decoder layer that adds little, with `head_rows` rows of queries, of keys and of values."""
    shapes = {
        "self_attn.q_proj": (head_rows, hidden),
        "self_attn.k_proj": (head_rows, hidden),
        "self_attn.v_proj": (head_rows, hidden),
        "self_attn.o_proj": (hidden, head_rows),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }
    layer = {f"{prefix}.{name}.weight": noise.of(*shape) for name, shape in shapes.items()}
    norms = ["post_attention_layernorm", *(["input_layernorm"] if has_input_norm else [])]
    return layer | {f"{prefix}.{name}.weight": noise.on(torch.ones(hidden)) for name in norms}


def sizes(hidden: int = HIDDEN) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16,
    }


@dataclass(frozen=True)
class Eagle3:
    """Writes EAGLE-3 heads.

    The layer sees the embedding through its attention alone: queries and keys are alike and large, so that a row
    attends to itself, and its value is the embedding less the old state, which replaces the one by the other.
    """

    options: dict[str, Any] = field(default_factory=dict)
    hidden: int = HIDDEN
    num_layers: int = 1
    rank: int | None = None
    is_speculators: bool = False

    def __call__(self, tiny_models: TinyModels, target: Path) -> Path:
        embedding, final_norm, output = target_weights(target)
        hidden, noise, eye = self.hidden, Noise(), torch.eye(self.hidden)
        padded = hidden - HIDDEN
        final_norm = torch.cat([final_norm, torch.ones(padded)]) * (HIDDEN / hidden) ** 0.5
        ids = torch.arange(VOCAB_SIZE)[VOCAB_SIZE - DRAFT_VOCAB_SIZE :]
        rows = torch.cat([output, torch.zeros(VOCAB_SIZE, padded)], dim=1)[ids]
        both = torch.cat([2.5 * eye, 0 * eye], dim=1).repeat_interleave(2, 0)  # [2 H, 2 H]: heads of 2 H / NUM_HEADS
        values = torch.cat([torch.cat([eye, 0 * eye], dim=1), torch.cat([0 * eye, eye], dim=1)])
        tensors = {
            **ordinary_layer("midlayer", hidden, 2 * hidden, noise),
            "midlayer.self_attn.q_proj.weight": noise.on(both),
            "midlayer.self_attn.k_proj.weight": noise.on(both),
            "midlayer.self_attn.v_proj.weight": noise.on(values),
            "midlayer.self_attn.o_proj.weight": noise.on(torch.cat([eye, -eye], dim=1)),
            "midlayer.hidden_norm.weight": noise.on(torch.ones(hidden)),
            "norm.weight": final_norm,
            "lm_head.weight": noise.on(rows),
            "d2t": ids - torch.arange(DRAFT_VOCAB_SIZE),
            "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True),
        }
        reads_final_state = self.options.get("use_aux_hidden_state") is False
        if not reads_final_state:
            tensors["fc.weight"] = noise.of(hidden, 3 * HIDDEN)
        for index in range(1, self.num_layers):
            tensors |= ordinary_layer(f"layers.{index}", hidden, 2 * hidden, noise)
        if self.options.get("fc_norm"):
            tensors |= {f"fc_norm.{index}.weight": noise.on(torch.ones(HIDDEN)) for index in range(3)}
        if padded:
            tensors["embed_tokens.weight"] = torch.cat([embedding, noise.of(VOCAB_SIZE, padded)], dim=1)
        if self.rank is not None:
            tensors |= low_rank(tensors["lm_head.weight"], self.rank)
        own = {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [2, 3, 4], **self.options}
        config = sizes(hidden) | {"head_dim": 2 * hidden // NUM_HEADS, "num_hidden_layers": self.num_layers}
        if not self.is_speculators:
            return tiny_models.write(config | own, tensors)
        saved = {"speculators_model_type": "eagle3", "transformer_layer_config": config, **own}
        names = {name: name.replace("midlayer.", "layers.0.") for name in tensors}
        return tiny_models.write(saved, {names[name]: tensor for name, tensor in tensors.items()})


@dataclass(frozen=True)
class Eagle:
    """Writes EAGLE-1 heads, whose `fc` passes the embedding on as the target's normed state would be."""

    options: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 1
    rank: int | None = None
    is_pickled: bool = False

    def __call__(self, tiny_models: TinyModels, target: Path) -> Path:
        _, final_norm, output = target_weights(target)
        noise = Noise()
        tensors = {"fc.weight": torch.cat([noise.on(torch.diag(final_norm)), noise.of(HIDDEN, HIDDEN)], dim=1)}
        for index in range(self.num_layers):
            tensors |= ordinary_layer(f"layers.{index}", HIDDEN, HIDDEN, noise, has_input_norm=index > 0)
        if self.options.get("add_para_norm"):
            for name in ("embedding_layernorm", "hidden_states_layernorm"):
                tensors[f"{name}.weight"] = noise.on(torch.ones(HIDDEN))
        if self.options.get("bias"):
            tensors["fc.bias"] = noise.of(HIDDEN)
        if self.rank is not None:
            tensors |= low_rank(output, self.rank)
        config = sizes() | {"num_hidden_layers": self.num_layers} | self.options
        folder = tiny_models.write(config, tensors)
        if self.is_pickled:
            (folder / "model.safetensors").unlink()
            torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "token_map.json").write_text(json.dumps(list(range(VOCAB_SIZE - 1, 5, -1))))
        return folder


def low_rank(output: Tensor, rank: int) -> dict[str, Tensor]:
    """The best factors of an output projection, under their published names."""
    left, singular, right = torch.linalg.svd(output, full_matrices=False)
    return {
        "efficient_lm_head.weight": (left * singular)[:, :rank].contiguous(),
        "efficient_lm_head_down_proj.weight": right[:rank].contiguous(),
    }


def no_options(folder: Path) -> HeadOptions:
    return HeadOptions()


@dataclass(frozen=True)
class Row:
    """One published form of a head.

    Args:
        kind: what the head must be found to be.
        write: makes the head for a target and returns its path.
        options: what a user would say of it.
    """

    kind: str
    write: Callable[[TinyModels, Path], Path]
    options: Callable[[Path], HeadOptions] = no_options


EAGLE_31 = {"fc_norm": True, "norm_output": True}
HEADS = {
    "eagle3": Row("eagle3", Eagle3()),
    "eagle3 of speculators": Row("eagle3", Eagle3({"norm_before_residual": True}, is_speculators=True)),
    "eagle3 with two layers": Row("eagle3", Eagle3(num_layers=2)),
    "eagle3 wider than its target": Row("eagle3", Eagle3({"target_hidden_size": HIDDEN}, hidden=48)),
    "eagle3 on the final state": Row("eagle3", Eagle3({"use_aux_hidden_state": False})),
    "eagle3 with candidate head and window": Row(
        "eagle3", Eagle3(EAGLE_31 | {"sliding_window": 4}, rank=12), lambda _: HeadOptions(num_candidates=16)
    ),
    "eagle": Row("eagle", Eagle()),
    "eagle with a bias in a pickle": Row("eagle", Eagle({"bias": True}, is_pickled=True)),
    "eagle of HASS with two layers": Row("eagle", Eagle({"add_para_norm": True, "bias": True}, num_layers=2)),
    "eagle with token map": Row("eagle", Eagle(), lambda path: HeadOptions(token_map=str(path / "token_map.json"))),
    "eagle with candidate head": Row("eagle", Eagle({"num_candidates": 16}, rank=12)),
}


@pytest.fixture(scope="module")
def heads(models: Models, tiny_models: TinyModels) -> Callable[[str], DraftHead]:
    """Loads the head of a row, once."""
    loaded: dict[str, DraftHead] = {}

    def load(name: str) -> DraftHead:
        if name not in loaded:
            row = HEADS[name]
            path = row.write(tiny_models, models.target_folder)
            assert open_head(path).kind == row.kind
            weights = TargetWeights(models.target_folder, models.target.config)
            loaded[name] = load_head(path, weights, torch.float32, torch.device("cpu"), row.options(path))
        return loaded[name]

    return load


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", HEADS)
def test_text_is_the_targets(
    name: str,
    shape: TreeShape,
    heads: Callable[[str], DraftHead],
    models: Models,
    jobs: list[Job],
    plain_texts: list[list[int]],
    new_generation: type[Generation],
) -> None:
    """Catches a kind whose drafts change the text at any temperature, or are never accepted."""
    head, layout = heads(name), PoolLayout(num_pages=24, page_size=16)
    target = TargetRunner(models.target, layout, head.capture)
    workers = LocalWorkers(target, DraftRunner(head, layout, choices=shape.choices))
    generation = new_generation(workers, shape, max_batch_size=4, max_prefill_tokens=7)
    for job in jobs:
        generation.submit(job)
    assert generation.run() == plain_texts
    num_accepted = [len(run.tokens) - 1 for run in generation.decode_runs]
    assert sum(num_accepted) > MIN_ACCEPTED * len(num_accepted)
    assert workers.target.num_granted_pages == workers.drafter.num_granted_pages == 0


@pytest.mark.parametrize("shape", ["dynamic", "static"])
@pytest.mark.parametrize("name", HEADS)
def test_recorded_text_is_the_targets(
    name: str,
    shape: str,
    heads: Callable[[str], DraftHead],
    models: Models,
    jobs: list[Job],
    plain_texts: list[list[int]],
    new_generation: type[Generation],
) -> None:
    """Catches a kind whose drafts or features go wrong when steps and drafts are replayed from recordings."""
    head, layout, tree = heads(name), PoolLayout(num_pages=24, page_size=16), SHAPES[shape]
    limits = GraphLimits(4, tree.node_budget, tree.draft_depth, layout.num_pages, tree.width)
    target, drafter = TargetRunner(models.target, layout, head.capture), DraftRunner(head, layout, choices=tree.choices)
    target.record_graphs(limits, EagerRecorder())
    drafter.record_graphs(limits, EagerRecorder())
    generation = new_generation(LocalWorkers(target, drafter), tree, max_batch_size=4, max_prefill_tokens=64)
    for job in jobs:
        generation.submit(job)
    assert generation.run() == plain_texts
    num_accepted = [len(run.tokens) - 1 for run in generation.decode_runs]
    assert sum(num_accepted) > MIN_ACCEPTED * len(num_accepted)


def test_few_candidates_make_narrow_trees(
    models: Models,
    tiny_models: TinyModels,
    jobs: list[Job],
    plain_texts: list[list[int]],
    new_generation: type[Generation],
) -> None:
    """Catches a tree asked to be wider than what the factors of a candidate head retrieve."""
    path, layout = Eagle(rank=12)(tiny_models, models.target_folder), PoolLayout(num_pages=24, page_size=16)
    weights = TargetWeights(models.target_folder, models.target.config)
    head = load_head(path, weights, torch.float32, torch.device("cpu"), HeadOptions(num_candidates=2))
    workers = LocalWorkers(TargetRunner(models.target, layout, head.capture), DraftRunner(head, layout))
    generation = new_generation(workers, SHAPES["dynamic"], max_batch_size=4)
    for job in jobs:
        generation.submit(job)
    assert generation.run() == plain_texts
    with pytest.raises(ValueError, match="asks for 3 candidates of one node, the head can propose only 2 tokens"):
        DraftRunner(head, layout, choices=STATIC)
