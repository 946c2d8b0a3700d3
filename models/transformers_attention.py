"""Eyas's place in the attention interface of `transformers`: whoever runs a model gets each layer's attention to do.

A model's own code calls a function chosen by name, which knows neither caches nor requests. The run in progress reaches
it through a context variable, so that runners in several threads, even of one model, never meet.

Letters: T tokens, Hq / Hkv heads, D head dim, Dv head dim of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from eyas.kernels.attention_options import AttentionOptions

ATTENTION_NAME = "eyas"  # not in the mask interface of transformers, which then makes no masks

# What layers pass along that does not change the result of attention over a text of one sequence.
_HARMLESS = {
    *("dropout", "is_causal", "deterministic", "position_ids", "position_embeddings", "cache_position"),
    *("use_cache", "cache", "past_key_values", "return_dict", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}


class ModelRun(Protocol):
    """One forward pass, as the model's layers and hooks see it."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Any
    ) -> Tensor:
        """`[T, Hq, D]`, `[T, Hkv, D]` and `[T, Hkv, Dv]` to `[T, Hq, Dv]`; `mask` is whatever the layer was given."""
        ...

    def note_state(self, index: int, state: Tensor) -> None:
        """Residual stream after `index` layers, `[1, T, H]`."""
        ...


_RUN: ContextVar[ModelRun] = ContextVar("eyas_model_run")


@contextmanager
def running(run: ModelRun) -> Iterator[None]:
    """Make `run` the one that models called in this context report to."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def note_states(layers: nn.ModuleList) -> None:
    """Let the layers of a decoder report the residual stream before, between and after them."""

    def before(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            run = _RUN.get(None)
            if run is not None:
                run.note_state(index, args[0] if args else kwargs["hidden_states"])

        return hook

    def after_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        run = _RUN.get(None)
        if run is not None:
            run.note_state(len(layers), output[0] if isinstance(output, tuple) else output)

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before(index), with_kwargs=True)
    layers[-1].register_forward_hook(after_last)


def route(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function `transformers` calls: heads first, `[1, Hq, T, D]`, to `[1, T, Hq, Dv]`.

    `sliding_window` is not read: what a layer sees is what its mask says, which the probe has measured.

    Raises:
        ValueError: for a layer that asks for something Eyas's attention does not do.
    """
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise ValueError(f"its attention asks for {', '.join(unknown)}, which Eyas's attention does not know")
    layer = getattr(module, "layer_idx", None)
    if layer is None or query.shape[0] != 1:
        raise ValueError("its attention layers do not say which layer of which text they are")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("its attention is not causal")
    options = AttentionOptions(scale=scaling, softcap=softcap, sinks=s_aux)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return _RUN.get().attend(layer, query, key, value, options, attention_mask)[None], None


AttentionInterface.register(ATTENTION_NAME, route)
