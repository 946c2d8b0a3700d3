"""MTP modules in whole generations: the text is the target's, whatever tree they draft, and their caches stay true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.static_tree import TreeChoices
from eyas.models.decoder import Decoder
from eyas.models.head_loading import load_head
from eyas.models.mtp import MtpHead
from eyas.models.target_loading import load_target_decoder
from eyas.models.target_weights import TargetWeights
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import KVPool, PoolLayout
from eyas.workers.loading import EngineSpec
from eyas.workers.local import LocalWorkers
from eyas.workers.messages import AcceptedRun, NewRequest, PrefillChunk, StepPlan
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job

CPU = torch.device("cpu")
CACHE_TOLERANCE = 1e-5  # float32; rows computed in a tree, a chunk and a whole text sum in other orders
HIDDEN = 32
STATIC = TreeChoices.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0)])
SHAPES = {"chain": TreeShape(6, 5, 1), "dynamic": TreeShape(14, 4, 3), "static": TreeShape.fixed(STATIC)}

DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 2,
}


@dataclass(frozen=True)
class Pair:
    """A target with the module in its own folder."""

    target: Decoder
    head: MtpHead

    def workers(self, layout: PoolLayout, choices: TreeChoices | None = None) -> LocalWorkers:
        target = TargetRunner(self.target, layout, self.head.capture)
        return LocalWorkers(target, DraftRunner(self.head, layout, choices=choices))


def guessing_module(folder: Path, prefix: str, names: dict[str, str], hidden_first: bool) -> dict[str, Tensor]:
    """A module that is accepted often, as a trained one is: it passes the newest token's embedding on.

    The targets of these tests nearly follow from that. Its layer, the target's last with half the effect, and a little
    of the hidden state keep every part in the result.
    """
    target = load_file(folder / "model.safetensors")
    last = "model.layers.3."
    module = {f"{prefix}{name.removeprefix(last)}": x.clone() for name, x in target.items() if name.startswith(last)}
    for name, tensor in module.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.mul_(0.5)
    of_hidden = 0.02 * torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5))
    halves = [of_hidden, torch.eye(HIDDEN)] if hidden_first else [torch.eye(HIDDEN), of_hidden]
    own = {
        "enorm": torch.ones(HIDDEN),
        "hnorm": torch.ones(HIDDEN),
        "eh_proj": torch.cat(halves, dim=1),
        "norm": target["model.norm.weight"],
    }
    return module | {f"{prefix}{names[name]}.weight": tensor.clone() for name, tensor in own.items()}


def deepseek_folder(tiny_models: TinyModels) -> Path:
    folder = tiny_models.target("DeepseekV3ForCausalLM", layer_gain=0.3, **DEEPSEEK)
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
    add_tensors(folder, guessing_module(folder, "model.layers.4.", names, hidden_first=False))
    return folder


def mimo_folder(tiny_models: TinyModels) -> Path:
    folder = tiny_models.target("Qwen2ForCausalLM", layer_gain=0.3)
    names = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "norm": "final_layernorm",
    }
    add_tensors(folder, guessing_module(folder, "model.mtp_layers.0.", names, hidden_first=True))
    return folder


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module", params=[deepseek_folder, mimo_folder], ids=["deepseek", "mimo"])
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Pair:
    make: Callable[[TinyModels], Path] = request.param
    folder = make(tiny_models)
    target = load_target_decoder(folder, torch.float32, CPU)
    head = load_head(folder, TargetWeights(folder, target.config), torch.float32, CPU)
    assert isinstance(head, MtpHead)
    return Pair(target, head)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_accepted_and_leave_the_text_alone(
    shape: str, temperature: float, pair: Pair, jobs: list[Job], new_generation: type[Generation]
) -> None:
    """Catches features of another state or position, a cache torn between levels, and a draft that changes the text."""
    tree = SHAPES[shape]
    seeds = [SamplingParams(temperature=temperature, seed=index) for index in range(len(jobs))]
    asked = [type(job)(job.prompt_ids, sampling, job.max_tokens) for job, sampling in zip(jobs, seeds, strict=True)]
    speculative = new_generation(pair.workers(PoolLayout(24, 16), tree.choices), tree, max_batch_size=4)
    plain = new_generation(LocalWorkers(TargetRunner(pair.target, PoolLayout(24, 16), ()), None), TreeShape())
    for generation in (speculative, plain):
        for job in asked:
            generation.submit(job)
    assert speculative.run() == plain.run()
    num_accepted = [len(run.tokens) - 1 for run in speculative.decode_runs]
    assert sum(num_accepted) > 0.5 * len(num_accepted)
    assert max(num_accepted) == tree.draft_depth
    workers: Any = speculative.workers
    assert workers.target.num_granted_pages == workers.drafter.num_granted_pages == 0


@pytest.mark.parametrize("max_prefill_tokens", [3, 512])
def test_caches_equal_a_prefill_of_the_text(
    max_prefill_tokens: int, pair: Pair, jobs: list[Job], new_generation: type[Generation]
) -> None:
    """Catches guesses left in the module's cache, values as wide as keys, an embedding masked at a chunk."""
    workers = pair.workers(PoolLayout(24, 16))
    generation = new_generation(workers, SHAPES["dynamic"], max_batch_size=4, max_prefill_tokens=max_prefill_tokens)
    for job in jobs[:6]:
        generation.submit(job)
    num_checked = 0
    for step, _ in enumerate(generation.steps()):
        for running in generation.requests.values():
            length = running.num_committed
            if step % 4 or running.is_over or length < len(running.job.prompt_ids):
                continue
            slots = workers.target.layout.slots_of(running.pages)[:length]
            expected = draft_pool(pair, running.text[:length], running.text[length])
            assert isinstance(workers.drafter, DraftRunner)
            for cache, reference in zip(workers.drafter.pool.caches, expected.caches, strict=True):
                own = cache[slots]
                torch.testing.assert_close(own, reference[:length], rtol=CACHE_TOLERANCE, atol=CACHE_TOLERANCE)
            num_checked += 1
    assert num_checked > 3


def draft_pool(pair: Pair, token_ids: list[int], root: int) -> KVPool:
    """The module's cache of committed `token_ids`, whose next token is `root`, prefilled in one piece and alone."""
    layout = PoolLayout(num_pages=len(token_ids), page_size=1)
    plan = StepPlan(
        1,
        [NewRequest(0, token_ids, SamplingParams())],
        {0: list(range(len(token_ids)))},
        prefill=[PrefillChunk(0, len(token_ids))],
    )
    features = TargetRunner(pair.target, layout, pair.head.capture).step(plan, {}).features
    assert features is not None
    drafter = DraftRunner(pair.head, layout)
    drafter.update_requests(plan)
    drafter.extend([AcceptedRun(0, 0, len(token_ids), [root])], features)
    assert drafter.pool is not None
    return drafter.pool


def test_its_layer_is_not_recorded(tiny_models: TinyModels) -> None:
    """Catches a layer from transformers inside a CUDA graph, where it may look at the device."""
    folder = mimo_folder(tiny_models)
    spec = EngineSpec(str(folder), str(folder), "bfloat16", "cuda", 8, 16, num_threads=1)
    with pytest.raises(ValueError, match="cuda_graphs: the layer of an MTP head runs through transformers"):
        spec.validate(draft_depth=2, width=2)
    msgspec.structs.replace(spec, cuda_graphs=False).validate(draft_depth=2, width=2)
