"""What Eyas needs to know of a target, read from its Hugging Face `config.json`.

Llama-family files are read here; everything else through `transformers`, see `models.transformers_config`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_REQUIRED_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a decoder; `raw` keeps the file for the RoPE variants that transformers computes.

    Args:
        num_kv_heads, head_dim, value_head_dim: of the cached keys and values; MLA models cache them expanded.
        intermediate_size, rms_norm_eps, qk_norm: read by the native decoder alone.
        qk_norm: RMSNorm over the head dimension of queries and keys (Qwen3).
        is_native: `LlamaDecoder` runs it; otherwise `TransformersDecoder` does.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    qk_norm: bool
    is_native: bool
    raw: dict[str, Any]

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> DecoderConfig:
        """Normalise a `config.json`.

        Raises:
            ValueError: naming the field, for an architecture or option that cannot be served.
        """
        architecture = (raw.get("architectures") or ["?"])[0]
        if raw.get("quantization_config"):
            raise ValueError("quantization_config: quantised weights are not supported; use the unquantised checkpoint")
        if architecture not in NATIVE_ARCHITECTURES or needs_transformers(raw, architecture):
            from eyas.models.transformers_config import decoder_fields

            return DecoderConfig(architecture=architecture, is_native=False, raw=raw, **decoder_fields(raw))
        require_fields(raw, *_REQUIRED_FIELDS)
        max_positions = int(raw["max_position_embeddings"])
        num_heads = int(raw["num_attention_heads"])
        num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}")
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // num_heads)
        return DecoderConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=max_positions,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            is_native=True,
            raw=raw,
        )

    @staticmethod
    def from_folder(folder: Path) -> DecoderConfig:
        """Read `config.json` of a Hugging Face folder."""
        return DecoderConfig.from_dict(read_json(folder / "config.json"))

    def tensor_parallel_sizes(self) -> list[int]:
        """Numbers of ranks this model can be split over: divisors of its heads and of its MLP."""
        if not self.is_native:
            return [1]
        return [
            size
            for size in range(1, self.num_kv_heads + 1)
            if self.num_kv_heads % size == 0 and self.num_heads % size == 0 and self.intermediate_size % size == 0
        ]

    def check_tensor_parallel(self, size: int) -> None:
        """Raise `ValueError`, naming the sizes that work, if the model cannot be split over `size` ranks."""
        if size != 1 and not self.is_native:
            raise ValueError(
                f"tensor_parallel_size: {size} cannot split {self.architecture}, which runs through transformers; only "
                f"{', '.join(NATIVE_ARCHITECTURES)} without sliding window, mlp_bias or another hidden_act than silu "
                "can be split; use 1"
            )
        if size not in self.tensor_parallel_sizes():
            raise ValueError(
                f"tensor_parallel_size: {size} cannot split {self.num_heads} query heads, {self.num_kv_heads} "
                f"key-value heads and an MLP of {self.intermediate_size}; sizes that work: "
                f"{self.tensor_parallel_sizes()}"
            )

    @property
    def final_index(self) -> int:
        """Capture index of the state after the final norm; 0 … num_layers are residual-stream states before it."""
        return self.num_layers + 1

    def default_aux_layers(self) -> tuple[int, ...]:
        """Residual-stream indices EAGLE-3 reads unless a head says otherwise: low, middle and high."""
        return (2, self.num_layers // 2, self.num_layers - 3)


def needs_transformers(raw: dict[str, Any], architecture: str) -> bool:
    """Whether a native architecture has an option on that only its `transformers` implementation has."""
    window, max_positions = raw.get("sliding_window"), raw.get("max_position_embeddings")
    is_windowed = (
        architecture != "LlamaForCausalLM"
        and window is not None
        and max_positions is not None
        and int(window) < int(max_positions)
        and bool(raw.get("use_sliding_window", architecture == "MistralForCausalLM"))
    )
    # Llama has no window whatever its file says; Mistral's is on unless switched off, Qwen's off unless switched on.
    return is_windowed or raw.get("hidden_act", "silu") != "silu" or bool(raw.get("mlp_bias"))


def require_fields(raw: dict[str, Any], *names: str) -> None:
    """Raise `ValueError`, naming the first field that a `config.json` lacks."""
    for name in names:
        if raw.get(name) is None:
            raise ValueError(f"{name}: is missing from config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file, with errors that name the file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content
