"""Any decoder of `transformers` as a target: its own code, with Eyas's attention in place of its cache and masks.

Rows run as one flat batch entry without a cache; queries, keys and values of each layer go to the runner's `Attention`.
What the model does to its logits (scaling, softcap) is done by its own code too.

Letters: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.kernels.attention_options import AttentionOptions
from eyas.models.attention import Attention
from eyas.models.config import DecoderConfig
from eyas.models.decoder import DecoderOutput
from eyas.models.parallel import TensorParallel
from eyas.models.transformers_attention import ATTENTION_NAME, note_states, running
from eyas.models.transformers_probe import PROBE_NAME, measure_windows

NUM_CHECKED_TOKENS = 11
NUM_SHARED_TOKENS = 9
# What a model's own code raises when it is run in a way it was not written for.
UNSERVABLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Two texts that share their first tokens, and their logits by the model's own eager attention.

    Args:
        token_ids: `[2, NUM_CHECKED_TOKENS]`, equal in the first `NUM_SHARED_TOKENS`.
        logits: `[2, NUM_CHECKED_TOKENS, V]`.
    """

    token_ids: Tensor
    logits: Tensor


class TransformersDecoder(nn.Module):
    """A `Decoder` that runs a model of `transformers`; never split over ranks.

    Args:
        model: a causal language model whose attention implementation is `ATTENTION_NAME`.
        windows: per layer, see `measure_windows`.
        reference: for the self-check, which drops it.
    """

    def __init__(
        self, config: DecoderConfig, model: Any, windows: tuple[int | None, ...], reference: ReferenceLogits | None
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = TensorParallel()
        self.reference = reference
        self._decoder = model.get_decoder()
        self._windows = windows
        self._head = _without_decoder(model)
        self._embedding = model.get_input_embeddings().weight

    @property
    def device(self) -> torch.device:
        device: torch.device = self._embedding.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._embedding.dtype
        return dtype

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, capture: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """See `Decoder`."""
        run = _Run(attention, self._windows, frozenset(capture))
        with running(run):
            output = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden = run.states[self.config.final_index] = output.last_hidden_state[0]
        features = torch.cat([run.states[index] for index in capture], dim=-1) if capture else None
        return DecoderOutput(hidden=hidden, features=features)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def load_transformers_decoder(
    folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> TransformersDecoder:
    """Load a Hugging Face safetensors folder through `transformers`, and look at what its layers ask for.

    Raises:
        ValueError: naming the architecture, why it cannot be served, and what to use instead.
    """
    try:
        model = _load_model(folder, dtype).to(device)
        with torch.inference_mode():
            reference = _reference_logits(model, config)
            _set_attention(model, PROBE_NAME)
            decoder = model.get_decoder()
            note_states(_layers_of(decoder, config))
            windows = measure_windows(decoder, config, reference.token_ids[0])
            _set_attention(model, ATTENTION_NAME)
            served = TransformersDecoder(config, model, windows, reference).eval()
            served.logits(torch.zeros(1, config.hidden_size, dtype=dtype, device=device))
        return served
    except UNSERVABLE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"architectures: {config.architecture} in {folder} cannot be served through transformers: {reason}; see "
            "docs/targets.md for what can"
        ) from error


@dataclass(slots=True)
class _Run:
    attention: Attention
    windows: tuple[int | None, ...]
    capture: frozenset[int]
    states: dict[int, Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Any
    ) -> Tensor:
        if mask is not None:
            raise ValueError(f"layer {layer} builds its own attention mask")
        return self.attention(layer, query, key, value, replace(options, window=self.windows[layer]))

    def note_state(self, index: int, state: Tensor) -> None:
        if index in self.capture:
            self.states[index] = state[0]


class _StoredStates(nn.Module):
    """Stands where a causal language model has its decoder: returns the states it is given as embeddings."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _StoredOutput:
        return _StoredOutput(inputs_embeds)


class _StoredOutput:
    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        """Router logits, caches and the like, which architectures pass on if there are any."""
        if name.startswith("__"):
            raise AttributeError(name)


def _without_decoder(model: Any) -> Any:
    """The model's own way from final states to logits: itself, its decoder replaced."""
    prefix = model.base_model_prefix
    if prefix not in model._modules:
        raise ValueError(f"its decoder is not its part {prefix!r}")
    head = copy.copy(model)
    head._modules = {**model._modules, prefix: _StoredStates()}
    return head


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ValueError(str(error)) from error
    model, report = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            raise ValueError(f"its files have {problem.replace('_keys', '')} tensors: {sorted(report[problem])[:3]}")
    return model.eval()


def _set_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    if model.get_decoder().config._attn_implementation != name:
        raise ValueError("its attention does not go through the attention interface of transformers")


def _layers_of(decoder: nn.Module, config: DecoderConfig) -> nn.ModuleList:
    for part in decoder.children():
        if isinstance(part, nn.ModuleList) and len(part) == config.num_layers:
            return part
    raise ValueError(f"its decoder has no list of {config.num_layers} layers")


def _reference_logits(model: Any, config: DecoderConfig) -> ReferenceLogits:
    """Random texts over the middle of the vocabulary, whose ends hold the special tokens."""
    generator = torch.Generator().manual_seed(0)
    size = config.vocab_size
    token_ids = torch.randint(size // 4, size // 2, (2, NUM_CHECKED_TOKENS), generator=generator)
    token_ids[1] = torch.where(torch.arange(NUM_CHECKED_TOKENS) < NUM_SHARED_TOKENS, token_ids[0], token_ids[1])
    if token_ids[0, NUM_SHARED_TOKENS] == token_ids[1, NUM_SHARED_TOKENS]:
        token_ids[1, NUM_SHARED_TOKENS] += 1
    token_ids = token_ids.to(model.device)
    return ReferenceLogits(token_ids, model(input_ids=token_ids, use_cache=False).logits)
