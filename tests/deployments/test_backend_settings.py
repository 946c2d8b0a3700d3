"""Backend settings on their way from the command line to the workers' spec, and what an engine's models rule out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from eyas.deployments import commands
from eyas.deployments.settings import EngineSettings
from eyas.kernels.backends import AUTO
from eyas.kernels.capabilities import ATTENTION_BACKENDS, KERNEL_BACKENDS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "max_position_embeddings": 8192, "sliding_window": 4096,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that serves."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def parsed(*options: str) -> EngineSettings:
    parser = commands._parser()
    return commands.settings_of(parser.parse_args(["serve", "some-model", *options]))


def config_folder(tmp_path: Path, config: dict[str, Any]) -> str:
    """A target that is nothing but its config."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_flags_reach_the_settings() -> None:
    """Catches a flag that is parsed and dropped."""
    plain = parsed()
    assert (plain.attention_backend, plain.kernel_backend, plain.cuda_graphs) == ("auto", "auto", True)
    chosen = parsed("--attention-backend", "flashinfer-cascade", "--kernel-backend", "reference", "--eager")
    assert (chosen.attention_backend, chosen.kernel_backend) == ("flashinfer-cascade", "reference")
    assert chosen.cuda_graphs is False


def test_settings_offer_what_is_declared() -> None:
    """Catches a backend that is declared and cannot be asked for."""
    offered = {name: get_args(EngineSettings.model_fields[name].annotation) for name in ("attention_backend",
                                                                                      "kernel_backend")}  # fmt: skip
    assert set(offered["attention_backend"]) == {AUTO, *ATTENTION_BACKENDS}
    assert set(offered["kernel_backend"]) == {AUTO, *KERNEL_BACKENDS}


def test_settings_reach_the_spec(tiny_models: TinyModels) -> None:
    """Catches workers that choose otherwise than the router checked."""
    target = tiny_models.target()
    settings = EngineSettings(model=str(target), head=str(tiny_models.head(target)), attention_backend="reference")
    spec = settings.engine_spec()
    assert (spec.attention_backend, spec.kernel_backend, spec.cuda_graphs) == ("reference", "auto", True)
    assert not spec.captures_graphs  # on a CPU
    head_attention = spec.head_attention()
    assert head_attention is not None
    assert (spec.target_attention().name, head_attention.name, spec.kernels().name) == ("reference",) * 3


def test_cuda_is_chosen_for_without_a_device(tiny_models: TinyModels) -> None:
    """Catches a router that asks for the device it does not have."""
    settings = EngineSettings(model=str(tiny_models.target()), speculate=False, device="cuda", num_pages=8)
    spec = settings.engine_spec()
    assert spec.captures_graphs
    assert (spec.target_attention().name, spec.head_attention(), spec.kernels().name) == ("triton", None, "triton")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_backend": "flash"}, "attention_backend"),
        ({"kernel_backend": "flashinfer"}, "kernel_backend"),
        ({"cuda_graphs": "sometimes"}, "cuda_graphs"),
    ],
)
def test_unknown_values_are_named(fields: dict[str, object], message: str) -> None:
    """Catches a misspelt backend that is replaced by the default."""
    with pytest.raises(ValueError, match=message):
        EngineSettings.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attention_backend": "triton"},
            "attention_backend: triton runs on cpu only interpreted, with TRITON_INTERPRET=1 in the environment; use "
            "reference",
        ),
        (
            {"kernel_backend": "triton"},
            "kernel_backend: triton runs on cpu only interpreted, with TRITON_INTERPRET=1 in the environment; use "
            "reference",
        ),
        ({"attention_backend": "flashinfer"}, "attention_backend: flashinfer does not run on cpu; use reference"),
        (
            {"device": "cuda", "attention_backend": "flashinfer-cascade"},
            "attention_backend: flashinfer-cascade cannot attend with the target's heads of 8, only of 64, 128, 256; "
            "use triton",
        ),
        (
            {"device": "cuda", "attention_backend": "flashinfer", "dtype": "float32", "cuda_graphs": False},
            "attention_backend: flashinfer does not compute in float32; use triton",
        ),
        (
            {"device": "cuda", "attention_backend": "reference"},
            "attention_backend: reference cannot be captured in CUDA graphs; use triton, or reference with --eager",
        ),
        (
            {"device": "cuda", "kernel_backend": "reference"},
            "kernel_backend: reference cannot be captured in CUDA graphs; use triton, or reference with --eager",
        ),
        (
            {"device": "cuda", "width": 40},
            "cuda_graphs: triton takes at most 32 for width, not 40, and no other kernel_backend can be captured; use "
            "--eager (reference)",
        ),
        (
            {"device": "cuda", "kernel_backend": "triton", "width": 32, "draft_depth": 6},
            "kernel_backend: triton takes at most 4096 for candidates, not 5152; use reference with --eager",
        ),
        (
            {"device": "cuda", "draft_depth": 64},
            "cuda_graphs: triton takes at most 63 for draft_depth, not 64, and no other kernel_backend can be "
            "captured; use --eager (reference)",
        ),
    ],
)
def test_what_a_tiny_engine_cannot_have(fields: dict[str, Any], message: str, tiny_models: TinyModels) -> None:
    """Catches a combination that starts its actors and dies in the first of them."""
    target = tiny_models.target()
    settings = EngineSettings(model=str(target), head=str(tiny_models.head(target)), **fields)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        settings.engine_spec()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (
            GEMMA_2, {"attention_backend": "flashinfer-cascade"},
            "attention_backend: flashinfer-cascade does not do the target's sliding windows; use triton",
        ),
        (
            GEMMA_2 | {"head_dim": 512}, {"attention_backend": "triton"},
            "attention_backend: triton cannot attend with the target's heads of 512, only up to 256; use reference "
            "with --eager",
        ),
        (
            GEMMA_2, {},
            "cuda_graphs: Gemma2ForCausalLM runs through transformers, whose code cannot be recorded; use --eager",
        ),
        (
            DEEPSEEK_V3, {},
            "cuda_graphs: triton cannot attend with the target's heads of 192 and values of 128, and no other "
            "attention_backend can be captured; use --eager (reference)",
        ),
        (
            DEEPSEEK_V3, {"attention_backend": "flashinfer", "cuda_graphs": False},
            "attention_backend: flashinfer cannot attend with the target's heads of 192 and values of 128; use "
            "reference",
        ),
    ],
)  # fmt: skip
def test_what_a_targets_config_rules_out(
    config: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Catches needs that only the loaded model would show."""
    folder = config_folder(tmp_path, config)
    settings = EngineSettings(model=folder, speculate=False, device="cuda", num_pages=8, **fields)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        settings.engine_spec()
    assert str(caught.value) == message


def test_windows_longer_than_the_context_are_none(tmp_path: Path) -> None:
    """Catches a backend refused for a window that never cuts."""
    folder = config_folder(tmp_path, GEMMA_2 | {"max_position_embeddings": 4096})
    settings = EngineSettings(
        model=folder, speculate=False, device="cuda", num_pages=8, attention_backend="flashinfer-cascade",
        cuda_graphs=False,
    )  # fmt: skip
    assert settings.engine_spec().target_attention().name == "flashinfer-cascade"


def test_the_draft_heads_needs_count_too(tiny_models: TinyModels) -> None:
    """Catches a target that fits and a head that dies in the drafter."""
    target = tiny_models.target(hidden_size=128, num_attention_heads=2, head_dim=64)
    head = tiny_models.head(target, head_dim=32)
    fields: dict[str, Any] = {"model": str(target), "head": str(head), "device": "cuda", "num_pages": 8}
    with pytest.raises(ValueError, match="cannot attend with the draft head's heads of 32, only of 64, 128, 256"):
        EngineSettings(attention_backend="flashinfer", cuda_graphs=False, **fields).engine_spec()
    windowed = tiny_models.head(target, head_dim=64, sliding_window=16, use_sliding_window=True)
    with pytest.raises(ValueError, match="flashinfer-cascade does not do the draft head's sliding windows; use triton"):
        EngineSettings(
            attention_backend="flashinfer-cascade", cuda_graphs=False, **(fields | {"head": str(windowed)})
        ).engine_spec()
