"""Settings that every test runs under, random models small enough to run many steps, and ranks in threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from eyas.kernels.interpreter import mend_interpreter
from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.parallel import TensorParallel

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any kernel module is imported
mend_interpreter()
settings.register_profile("eyas", deadline=None, max_examples=150)
settings.load_profile("eyas")


class TinyModels:
    """Writes random targets and heads as the folders they are published in.

    Every tensor is random, also the norms and biases that a fresh model leaves at one and zero: whoever forgets one
    gets other numbers. Layers are wide apart and logits peaked, so that no token is chosen by a rounding error.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._num_folders = 0

    def target(
        self, architecture: str = "LlamaForCausalLM", seed: int = 0, layer_gain: float = 1.0, **options: Any
    ) -> Path:
        """A target made and saved by `transformers`; `options` go to its config.

        Args:
            layer_gain: scales what each layer adds; a low one makes the next token depend mostly on the newest one.
        """
        import transformers

        model_class = getattr(transformers, architecture)
        sizes = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "sliding_window": None,
        }
        model = model_class(model_class.config_class(**sizes | options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_random_tensor(name, parameter.shape, generator))
                if "o_proj" in name or "down_proj" in name:
                    parameter.mul_(layer_gain)
        folder = self._next_folder()
        model.save_pretrained(folder)
        return folder

    def head(self, target: Path, seed: int = 0, draft_vocab_size: int | None = None, **options: Any) -> Path:
        """An EAGLE-3 head for `target` in its authors' layout; `options` go to its config."""
        of_target = json.loads((target / "config.json").read_text())
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": of_target["hidden_size"],
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": of_target["vocab_size"],
            "draft_vocab_size": draft_vocab_size or of_target["vocab_size"],
            "max_position_embeddings": 16,  # far below the target's: a head must not size its RoPE by it
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        } | options
        return self.write(config, self.head_tensors(config, seed))

    @staticmethod
    def head_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
        """Random tensors of a published head over three captured states; draft tokens are spread over all ids."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        vocab_size, draft_vocab_size = config["vocab_size"], config["draft_vocab_size"]
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // num_heads
        query_rows, kv_rows = num_heads * head_dim, config["num_key_value_heads"] * head_dim
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "fc.weight": (hidden, 3 * hidden),
            "midlayer.self_attn.q_proj.weight": (query_rows, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv_rows, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv_rows, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, query_rows),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (draft_vocab_size, hidden),
        }
        tensors = {name: _random_tensor(name, shape, generator) for name, shape in shapes.items()}
        target_ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = target_ids - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)
        return tensors

    def eagle_head(self, target: Path, seed: int = 0, **options: Any) -> Path:
        """An EAGLE-1 head for `target` in its authors' layout: one layer without its first norm; `options` as above."""
        of_target = json.loads((target / "config.json").read_text())
        hidden, inner, kv_rows = of_target["hidden_size"], 40, of_target["hidden_size"] // 2
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": of_target["vocab_size"],
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "bias": False,
        } | options
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "fc.weight": (hidden, 2 * hidden),
            "layers.0.self_attn.q_proj.weight": (hidden, hidden),
            "layers.0.self_attn.k_proj.weight": (kv_rows, hidden),
            "layers.0.self_attn.v_proj.weight": (kv_rows, hidden),
            "layers.0.self_attn.o_proj.weight": (hidden, hidden),
            "layers.0.mlp.gate_proj.weight": (inner, hidden),
            "layers.0.mlp.up_proj.weight": (inner, hidden),
            "layers.0.mlp.down_proj.weight": (hidden, inner),
            "layers.0.post_attention_layernorm.weight": (hidden,),
        }
        return self.write(config, {name: _random_tensor(name, shape, generator) for name, shape in shapes.items()})

    def changed(
        self, folder: Path, added: dict[str, tuple[int, ...]], removed: tuple[str, ...] = (), seed: int = 1
    ) -> Path:
        """A copy of a folder with random tensors of these shapes, and without those."""
        generator = torch.Generator().manual_seed(seed)
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if name not in removed}
        extra = {name: _random_tensor(name, shape, generator) for name, shape in added.items()}
        return self.write(json.loads((folder / "config.json").read_text()), kept | extra)

    def write(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        """A checkpoint folder that holds exactly this."""
        folder = self._next_folder()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    def _next_folder(self) -> Path:
        self._num_folders += 1
        return self._root / f"model-{self._num_folders}"


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.5 * noise
    if "norm" in name:
        return 1.0 + 0.3 * noise
    if "embed" in name:
        return noise
    gain = 3.0 if name == "lm_head.weight" else 1.0
    return gain * noise / shape[-1] ** 0.5


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


class TextAttention:
    """Causal attention of one text that grows from call to call, without pages and written out head by head."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN_ATTENTION
    ) -> Tensor:
        assert options == AttentionOptions(window=options.window)
        if layer in self.keys:
            key, value = torch.cat([self.keys[layer], key]), torch.cat([self.values[layer], value])
        self.keys[layer], self.values[layer] = key, value
        num_rows, num_heads, head_dim = query.shape
        num_before = key.shape[0] - num_rows
        is_visible = torch.ones(num_rows, key.shape[0], dtype=torch.bool).tril(num_before)
        if options.window is not None:
            is_visible = is_visible.triu(num_before - options.window + 1)
        group = num_heads // key.shape[1]
        heads = []
        for head in range(num_heads):
            scores = query[:, head] @ key[:, head // group].T / head_dim**0.5
            heads.append(scores.masked_fill(~is_visible, -torch.inf).softmax(-1) @ value[:, head // group])
        return torch.stack(heads, dim=1)


def run_in_ranks(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """What `work` returns in each rank of a Gloo group whose ranks are threads of this process."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        torch.set_num_threads(1)
        group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
        backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=30))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return work(TensorParallel(rank, size, group))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[TensorParallel], Any]], list[Any]]:
    return run_in_ranks


@pytest.fixture(scope="session")
def text_attention() -> Callable[[], TextAttention]:
    """Makes the attention of a new text."""
    return TextAttention


CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def save_chat_tokenizer() -> Callable[..., None]:
    """Saves a byte-level tokenizer into a folder: bytes are 0 to 255 in some order, <|im_end|> is 258."""

    def save(folder: Path, template: str | None = CHAT_TEMPLATE, adds_bos: bool = False) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("b", "b")]
        vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"bb": 256}
        rust = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        rust.decoder = decoders.ByteLevel()
        rust.add_special_tokens(["<|bos|>", "<|im_end|>", "<|im_start|>"])
        if adds_bos:
            rust.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 257)])
        fast = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<|bos|>", eos_token="<|im_end|>")
        fast.chat_template = template
        fast.save_pretrained(folder)

    return save


@pytest.fixture(scope="session")
def new_prior() -> Callable[..., AcceptancePrior]:
    """Makes priors of random curves, far from the raw scores."""

    def make(seed: int = 0, depths: int = 2, ranks: int = 3, regimes: str = "greedy sampled") -> AcceptancePrior:
        generator = torch.Generator().manual_seed(seed)
        knots = torch.tensor([-6.0, -3.0, -1.5, -0.5, 0.0])
        curves = [
            -torch.rand(depths, ranks, knots.numel(), generator=generator).mul(3).cumsum(2).flip(2) for _ in range(2)
        ]
        greedy, sampled = (
            x if name in regimes else None for x, name in zip(curves, ("greedy", "sampled"), strict=True)
        )
        return AcceptancePrior(knots, greedy, sampled)

    return make
