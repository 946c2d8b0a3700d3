"""Trees are worth their nodes: a head trained here, in seconds, is accepted further in trees than in its chain.

On text it knows by heart a head needs no tree: every level's first candidate is right, and the deepest chain wins. What
trees are for is text that can go on in several ways, so the head is trained and measured on answers at temperature 1,
to prompts it has seen and with seeds it has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from eyas.deployments.scheduler import TreeShape
from eyas.kernels.static_tree import TreeChoices
from eyas.models.llama import LlamaDecoder, load_decoder
from eyas.models.medusa import MedusaHead
from eyas.models.medusa_config import MedusaConfig
from eyas.models.stacked_linear import StackedLinear
from eyas.workers.draft import DraftRunner
from eyas.workers.kv_pool import PoolLayout
from eyas.workers.local import LocalWorkers
from eyas.workers.sampling import SamplingParams
from eyas.workers.target import TargetRunner

if TYPE_CHECKING:
    from tests.conftest import TinyModels
    from tests.workers.conftest import Generation, Job

NUM_HEADS, NUM_NODES, NUM_PROMPTS, NUM_SEEDS, TEXT_TOKENS = 7, 8, 12, 16, 48
LAYOUT = PoolLayout(num_pages=1024, page_size=16)
CHAIN = TreeShape(NUM_NODES, NUM_HEADS, 1)
DYNAMIC = TreeShape(NUM_NODES, 3, 4)
STATIC = TreeShape.fixed(TreeChoices.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]))


def sampled_texts(generation: Generation, prompts: list[list[int]], job: type[Job]) -> list[list[int]]:
    """Several answers of the target to every prompt at temperature 1, prompts included."""
    jobs = [job(prompt, SamplingParams(1.0, 1.0, seed), TEXT_TOKENS) for prompt in prompts for seed in range(NUM_SEEDS)]
    for each in jobs:
        generation.submit(each)
    return [each.prompt_ids + answer for each, answer in zip(jobs, generation.run(), strict=True)]


def train_head(target: LlamaDecoder, texts: list[list[int]], attention: Any) -> MedusaHead:
    """Plain cross-entropy of head i with token t + 2 + i; own projections, so that heads need not share a space."""
    config = target.config
    hidden, vocab_size, capture = config.hidden_size, config.vocab_size, (config.final_index,)
    generator = torch.Generator().manual_seed(0)
    head = MedusaHead(
        MedusaConfig(NUM_HEADS, 1, hidden, True, "own", vocab_size, vocab_size, 1.0, capture, (capture,)),
        [StackedLinear(torch.zeros(NUM_HEADS, hidden, hidden), torch.zeros(NUM_HEADS, hidden), trainable=True)],
        StackedLinear(0.1 * torch.randn(NUM_HEADS, vocab_size, hidden, generator=generator), trainable=True),
        torch.arange(vocab_size),
    )
    states, expected = [], []
    for text in texts:
        tokens = torch.tensor(text)
        with torch.inference_mode():
            output = target(tokens, torch.arange(len(text)), attention(), capture)
        following = tokens.unfold(0, NUM_HEADS, 1)[2:]  # [len - K - 1, K]: tokens t + 2 … t + 1 + K
        assert output.features is not None
        states.append(output.features[: len(following)].clone())
        expected.append(following)
    all_states, all_expected = torch.cat(states), torch.cat(expected)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(120):
        batch = torch.randint(len(all_states), (1024,), generator=generator)
        logits = head.logits(all_states[batch], range(1, NUM_HEADS + 1))
        loss = F.cross_entropy(logits.flatten(0, 1), all_expected[batch].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class Trained:
    """A target with the head trained on its answers to `prompts`, and the jobs it is measured on."""

    target: LlamaDecoder
    head: MedusaHead
    jobs: list[Job]

    def generation(self, new_generation: type[Generation], shape: TreeShape, shares_noise: bool) -> Generation:
        runner = TargetRunner(self.target, LAYOUT, (self.target.config.final_index,))
        drafter = DraftRunner(self.head, LAYOUT, shares_noise, shape.choices)
        generation = new_generation(LocalWorkers(runner, None if shape.node_budget == 1 else drafter), shape)
        for job in self.jobs:
            generation.submit(job)
        return generation


@pytest.fixture(scope="module")
def trained(
    tiny_models: TinyModels, jobs: list[Job], new_generation: type[Generation], text_attention: Callable[[], Any]
) -> Trained:
    job = type(jobs[0])
    target = load_decoder(tiny_models.target(layer_gain=0.6), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(61, (5,), generator=generator).tolist() for _ in range(NUM_PROMPTS)]
    alone = new_generation(LocalWorkers(TargetRunner(target, LAYOUT, ()), None), TreeShape(), max_batch_size=64)
    head = train_head(target, sampled_texts(alone, prompts, job), text_attention)
    measured = [job(prompt, SamplingParams(1.0, 1.0, 1000 + seed), 40) for seed, prompt in enumerate(prompts)]
    return Trained(target, head, measured)


@pytest.mark.parametrize("shares_noise", [True, False], ids=["shared noise", "plain top-k"])
def test_trees_accept_more_than_the_chain_of_as_many_nodes(
    trained: Trained, new_generation: type[Generation], shares_noise: bool
) -> None:
    """Catches trees that are only harmless: siblings that are never taken, levels drafted under the wrong parent."""
    plain = trained.generation(new_generation, TreeShape(), shares_noise).run()
    lengths = {}
    for name, shape in (("chain", CHAIN), ("dynamic", DYNAMIC), ("static", STATIC)):
        generation = trained.generation(new_generation, shape, shares_noise)
        assert generation.run() == plain, name
        runs = generation.decode_runs
        lengths[name] = sum(len(run.tokens) for run in runs) / len(runs)
    assert lengths["chain"] > 1.2
    assert lengths["dynamic"] > 1.05 * lengths["chain"]
    assert lengths["static"] > 1.05 * lengths["chain"]
