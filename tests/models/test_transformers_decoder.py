"""Targets that run through `transformers` against `transformers` itself, which forwards every path of a tree alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from eyas.kernels.kernel_set import REFERENCE_KERNELS
from eyas.kernels.reference_attention import ReferenceAttention
from eyas.models.decoder import Decoder
from eyas.models.parallel import TensorParallel
from eyas.models.target_loading import load_target_decoder
from eyas.models.transformers_decoder import TransformersDecoder
from eyas.workers.kv_pool import KVPool, PageTable, PoolLayout, page_table
from eyas.workers.messages import DecodeItem, NewRequest, PrefillChunk, StepPlan
from eyas.workers.paged_attention import AttentionGroup, PagedAttention, causal_rows
from eyas.workers.sampling import SamplingParams
from eyas.workers.self_check import check_target
from eyas.workers.target import TargetRunner
from eyas.workers.tree_batch import TreeBatch

if TYPE_CHECKING:
    from tests.conftest import TinyModels

CPU = torch.device("cpu")
VOCAB_SIZE = 61
TOLERANCE = 1e-4  # float32; rows of a tree, a chunk and a whole text sum in other orders
WINDOW = 5  # shorter than the prompts, and than the trees are deep
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}
THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2: softcaps, every other layer windowed": (
        "Gemma2ForCausalLM",
        {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 5.0},
    ),
    "gemma3: head norms, two ropes": (
        "Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 11,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3: fused projections": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "phi3 with a window": ("Phi3ForCausalLM", {"pad_token_id": 0, "sliding_window": WINDOW}),
    "mixtral: experts": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "gpt-oss: sinks, experts, yarn": (
        "GptOssForCausalLM", {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4}
    ),
    "deepseek-v3: latent attention, experts": ("DeepseekV3ForCausalLM", MLA),
    "mistral with a window": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen2 with a window in upper layers": (
        "Qwen2ForCausalLM", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}
    ),
    "llama with mlp biases": ("LlamaForCausalLM", {"mlp_bias": True, "hidden_act": "gelu"}),
    "granite: four multipliers": (
        "GraniteForCausalLM",
        {"logits_scaling": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0, "attention_multiplier": 0.4},
    ),
    "cohere2: logit scale, no rope in full layers": (
        "Cohere2ForCausalLM", {"sliding_window": WINDOW, "logit_scale": 0.8}
    ),
}  # fmt: skip
ALL = NATIVE | THROUGH_TRANSFORMERS
# Siblings at several levels, a node out of level order, and a branch longer than the window whose first nodes lie far
# behind their text positions.
TREE_PARENTS = [-1, 0, 0, 0, 3, 3, 5, 2, 6, 8, 8, 10]


def load(folder: Path) -> Decoder:
    return load_target_decoder(folder, torch.float32, CPU)


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def random_tokens(count: int, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def random_tree(seed: int = 4) -> tuple[list[int], list[int]]:
    """Tokens of `TREE_PARENTS`, distinct, so that no two paths are one text."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:12].tolist(), TREE_PARENTS


class PagedText:
    """One text on shuffled pages of a pool full of other texts' rows."""

    def __init__(self, decoder: Decoder, page_size: int, num_pages: int) -> None:
        config = decoder.config
        layout = PoolLayout(num_pages, page_size)
        self.decoder = decoder
        self.pool = KVPool(layout, config.num_layers, config.num_kv_heads, config.head_dim, torch.float32, CPU,
                           config.value_head_dim)  # fmt: skip
        for block in self.pool.blocks:
            block.copy_(torch.randn(block.shape, generator=torch.Generator().manual_seed(5)))
        self.pages = PageTable(layout, CPU)
        self.pages.append(random.Random(0).sample(range(num_pages), num_pages))
        self.backend = ReferenceAttention(self.pool.geometry(config.num_heads))

    def chain(self, token_ids: Tensor, start: int, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits and features of consecutive rows."""
        stop = start + token_ids.numel()
        attend = self.backend.plan(causal_rows([start], [token_ids.numel()], page_table([self.pages])))
        slots = self.pages.range(start, stop)
        attention = PagedAttention(self.pool, slots, [AttentionGroup(token_ids.numel(), attend)])
        output = self.decoder(token_ids, torch.arange(start, stop), attention, capture)
        return self.decoder.logits(output.hidden), output.features

    def tree(self, tree: tuple[list[int], list[int]], start: int) -> Tensor:
        """Logits of every node of a tree whose root stands at position `start`."""
        batch = TreeBatch.build([tree], [start], self.backend.mask_encoding, CPU, REFERENCE_KERNELS)
        attend = self.backend.plan(batch.paged_rows(page_table([self.pages]), has_windows=True))
        slots = self.pages.range(start, start + batch.num_rows)
        attention = PagedAttention(self.pool, slots, [AttentionGroup(batch.num_rows, attend)])
        positions = batch.layout.positions[0]
        return self.decoder.logits(self.decoder(batch.trees.tokens[0], positions, attention).hidden)


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("architecture", ALL)
@torch.inference_mode()
def test_chains_and_trees_equal_transformers(architecture: str, page_size: int, tiny_models: TinyModels) -> None:
    """Catches a scale, window, softcap, sink, logit scaling or width of heads that is lost on the way to the pages.

    A window counted in slots instead of text positions shows in the tree alone, as does a state of its own.
    """
    name, options = ALL[architecture]
    folder = tiny_models.target(name, **options)
    decoder, model = load(folder), reference(folder)
    assert isinstance(decoder, TransformersDecoder) == (architecture in THROUGH_TRANSFORMERS)
    check_target(decoder)
    prompt, (tokens, parents) = random_tokens(23), random_tree()
    text = PagedText(decoder, page_size, num_pages=48 // page_size)
    chunks = prompt.split(9)
    logits = torch.cat([text.chain(chunk, 9 * index)[0] for index, chunk in enumerate(chunks)])
    expected = model(prompt[None], use_cache=False).logits[0]
    assert float((logits - expected).abs().max()) <= TOLERANCE
    logits = text.tree((tokens, parents), prompt.numel())
    for node in range(len(tokens)):
        path = torch.tensor([tokens[ancestor] for ancestor in path_to(node, parents)])
        expected = model(torch.cat([prompt, path])[None], use_cache=False).logits[0, -1]
        assert float((logits[node] - expected).abs().max()) <= TOLERANCE, node


@pytest.mark.parametrize("architecture", ALL)
@torch.inference_mode()
def test_captured_states_equal_transformers(architecture: str, tiny_models: TinyModels) -> None:
    """Catches states that are off by a layer or by the final norm, and features in another order than asked for."""
    name, options = ALL[architecture]
    folder = tiny_models.target(name, **options)
    decoder, model = load(folder), reference(folder)
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    token_ids = random_tokens(13)
    states = list(model(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states)
    states.insert(-1, before_norm[0])
    capture = (decoder.config.final_index, *range(decoder.config.num_layers + 1), 2)
    _, features = PagedText(decoder, 16, 1).chain(token_ids, 0, capture)
    assert features is not None
    for index, state in zip(capture, features.chunk(len(capture), dim=-1), strict=True):
        torch.testing.assert_close(state, states[index][0], rtol=TOLERANCE, atol=TOLERANCE)


def greedy_text(model: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


@pytest.mark.parametrize("architecture", THROUGH_TRANSFORMERS)
@torch.inference_mode()
def test_text_in_trees_is_the_plain_text(architecture: str, tiny_models: TinyModels) -> None:
    """Catches compaction of one of two cache blocks, and positions of a ragged, padded batch of trees."""
    name, options = THROUGH_TRANSFORMERS[architecture]
    folder = tiny_models.target(name, **options)
    decoder, model, rng = load(folder), reference(folder), random.Random(7)
    prompts = [random_tokens(19).tolist(), random_tokens(4, seed=9).tolist()]
    texts = [greedy_text(model, prompt, 30) for prompt in prompts]
    runner = TargetRunner(decoder, PoolLayout(24, 4), (decoder.config.final_index,))
    pages = {0: list(range(0, 24, 2)), 1: list(range(1, 24, 2))}
    new = [NewRequest(index, prompt, SamplingParams()) for index, prompt in enumerate(prompts)]
    runner.step(StepPlan(1, new, pages, prefill=[PrefillChunk(0, 11), PrefillChunk(1, 4)]), {})
    runner.step(StepPlan(2, prefill=[PrefillChunk(0, 8)]), {})
    num_known = [len(prompt) + 1 for prompt in prompts]
    num_accepted = []
    while all(known - len(prompt) < 22 for known, prompt in zip(num_known, prompts, strict=True)):
        trees = {index: planted_tree(texts[index][num_known[index] - 1 :], rng) for index in (0, 1)}
        decode = [DecodeItem(index, len(trees[index][0])) for index in (0, 1)]
        for run in runner.step(StepPlan(3, decode=decode, draft_depth=7), trees).runs:
            known = num_known[run.request_id]
            assert run.tokens == texts[run.request_id][known : known + len(run.tokens)]
            num_known[run.request_id] = known + len(run.tokens)
            num_accepted.append(len(run.tokens) - 1)
    assert max(num_accepted) >= 3


def planted_tree(future: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """The text to come for a few levels, each true node after and before wrong siblings."""
    tokens, parents, last = [future[0]], [-1], 0
    for true in future[1 : 1 + rng.randint(1, 6)]:
        level = rng.sample([token for token in range(VOCAB_SIZE) if token != true], rng.randint(0, 2))
        level.insert(rng.randint(0, len(level)), true)
        first = len(tokens)
        tokens += level
        parents += [last] * len(level)
        last = first + level.index(true)
    return tokens, parents


@torch.inference_mode()
def test_threads_share_a_model(tiny_models: TinyModels) -> None:
    """Catches one runner's attention or capture reaching another's layers."""
    decoder = load(tiny_models.target("Gemma2ForCausalLM", head_dim=8, sliding_window=WINDOW))
    texts = [random_tokens(20, seed) for seed in range(8)]

    def run(token_ids: Tensor, capture: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            logits, features = PagedText(decoder, 16, 2).chain(token_ids, 0, capture)
        return torch.cat([logits, *([] if features is None else [features])], dim=1)

    captures = [(1,), (), (4, 2), (5,), (0,), (), (3,), (2,)]
    alone = [run(*job) for job in zip(texts, captures, strict=True)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(run, texts * 3, captures * 3))
    for found, expected in zip(together, alone * 3, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("FalconForCausalLM", {}, "does not go through the attention interface"),
        ("BloomForCausalLM", {}, "does not go through the attention interface"),
        ("DiffLlamaForCausalLM", {}, "layer 0 attends twice"),
        ("GPTNeoXForCausalLM", {}, r"layer 0 has queries, keys and values .*its config says"),
    ],
)
def test_models_that_attend_otherwise_are_refused(
    architecture: str, options: dict[str, Any], message: str, tiny_models: TinyModels
) -> None:
    """Catches a model that keeps its own masks or caches being served with half of its attention."""
    folder = tiny_models.target(architecture, **options)
    with pytest.raises(ValueError, match=rf"architectures: {architecture} in .*{message}.*docs/targets.md"):
        load(folder)


def test_text_decoder_of_a_multimodal_model(tmp_path: Path) -> None:
    """Catches a vision tower kept in memory, and logits of a model whose decoder lies one level deeper."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "sliding_window": WINDOW}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60,
                          boi_token_index=58, eoi_token_index=59)  # fmt: skip
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    decoder = load(tmp_path)
    check_target(decoder)
    assert isinstance(decoder, TransformersDecoder)
    assert not any("vision" in name for name, _ in decoder.named_parameters())


def test_decoder_within_a_decoder_is_refused(tmp_path: Path) -> None:
    """Catches a failure in the first step of a model whose logits are not made from its decoder's states."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                       word_embed_proj_dim=32, max_position_embeddings=256)  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"OPTForCausalLM in .* cannot be served through transformers"):
        load(tmp_path)


def test_bidirectional_attention_is_refused(tiny_models: TinyModels) -> None:
    """Catches a mask whose far end the short self-check never reaches: the probe must read it as it is."""
    folder = tiny_models.target("Gemma3ForCausalLM", head_dim=8, sliding_window=WINDOW)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"use_bidirectional_attention": True}))
    with pytest.raises(ValueError, match=r"Gemma3ForCausalLM .*(not causal|neither the whole text)"):
        load(folder)


def test_missing_tensors_are_refused(tiny_models: TinyModels) -> None:
    """Catches a layer that transformers fills with random numbers and a line in its log."""
    from safetensors.torch import load_file, save_file

    folder = tiny_models.target("MixtralForCausalLM", num_local_experts=2)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing tensors: .*layers\.2\.self_attn\.o_proj"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="MixtralForCausalLM in .*model.safetensors"):
        load(folder)


def test_ranks_are_refused(tiny_models: TinyModels) -> None:
    """Catches ranks that each load the whole model and sum their outputs."""
    folder = tiny_models.target("MixtralForCausalLM", num_local_experts=2)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2 cannot split MixtralForCausalLM"):
        load_target_decoder(folder, torch.float32, CPU, TensorParallel(rank=0, size=2))
