"""EAGLE-3 heads as vLLM's `speculators` library saves them: the same numbers in Eyas as in the library.

    python benchmarks/speculators_parity.py dump OUT     # where `pip install speculators` was done, not Eyas
    python benchmarks/speculators_parity.py check OUT    # where Eyas is installed

`dump` builds small random models in float32 on the CPU, one for each variant, and writes OUT/<variant>/ by the
library's own `save_pretrained`, and inputs and outputs to OUT/<variant>.safetensors. `check` loads the folders as Eyas
loads any head, prints the largest differences and exits 1 if one exceeds 1e-4. The outputs of a first pass over T pairs
are those of the library's `forward`; a drafted chain is what its layers give when every earlier row is computed again.

Letters: T pairs, K drafted tokens, A captured layers, H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 32, 48, 4, 2, 61, 23
NUM_PAIRS, NUM_DRAFTED = 12, 3
TOLERANCE = 1e-4
NUM_TARGET_LAYERS = 8
SHORT_LAYERS = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
# Options of the head, then of its layers.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {}),
    "fc_norm": ({"fc_norm": True}, {}),
    "norm_output": ({"norm_output": True}, {}),
    "two_layers": ({}, {"num_hidden_layers": 2}),
    "full_vocabulary": ({"draft_vocab_size": VOCAB_SIZE}, {}),
    "qwen3": ({}, {"model_type": "qwen3"}),
    "attention_bias": ({}, {"attention_bias": True}),
    "wide_heads": ({}, {"head_dim": 16}),
    "five_states": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}, {}),
    "sliding_window": ({}, {"model_type": "qwen3", **SHORT_LAYERS}),
    "mixed": (
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"model_type": "qwen3", "num_hidden_layers": 2},
    ),
}


def dump(out: Path) -> None:
    """Write every variant with its inputs and outputs."""
    for seed, name in enumerate(VARIANTS):
        generator = torch.Generator().manual_seed(seed)
        model = build(name, generator)
        num_states = len(model.config.eagle_aux_hidden_state_layer_ids)
        with torch.no_grad():
            case = run_library(
                model,
                2 * torch.randn(NUM_PAIRS, num_states * HIDDEN, generator=generator),
                torch.randint(VOCAB_SIZE, (NUM_PAIRS,), generator=generator),
            )
        model.save_pretrained(out / name)
        (out / name / "config.py").unlink(missing_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in case.items()}, out / f"{name}.safetensors")


def build(name: str, generator: torch.Generator) -> Any:
    """A model of the library whose every weight is random."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    of_head, of_layers = VARIANTS[name]
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HIDDEN // NUM_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    } | of_layers
    layers = (Qwen3Config if sizes.pop("model_type", "llama") == "qwen3" else LlamaConfig)(**sizes)
    layers._attn_implementation = "eager"  # the library's own choice compiles for blocks of 128 rows
    options = {"draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]} | of_head
    method = GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTED)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    served = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
    )
    config = Eagle3SpeculatorConfig(transformer_layer_config=layers, speculators_config=served, **options)
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "embed" not in key:
                noise *= 1.5 / weight.shape[-1] ** 0.5 if weight.ndim == 2 else 0.2
            weight.copy_(noise + 1 if "norm" in key else noise)
    if model.use_draft_vocab:
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
        in_draft = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
        model.load_vocab_mappings(in_draft, ids - torch.arange(DRAFT_VOCAB_SIZE))
    return model


def run_library(model: Any, features: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """A first pass over true features `[T, A * H]`, then a greedy chain of K drafted tokens."""
    seen: dict[str, list[Tensor]] = {"fc": [], "lm_head": []}
    hooks = [
        getattr(model, name).register_forward_hook(lambda _, __, out, name=name: seen[name].append(out[0]))
        for name in seen
    ]
    documents = torch.zeros(1, NUM_PAIRS, dtype=torch.long)
    model(hidden_states=features[None], input_ids=token_ids[None], document_ids=documents, ttt_steps=1)
    for hook in hooks:
        hook.remove()
    inputs, tokens, offsets = seen["fc"][0], token_ids, getattr(model, "d2t", None)
    logits, states = run_layers(model, inputs, tokens)
    torch.testing.assert_close(logits, seen["lm_head"][0], rtol=1e-5, atol=1e-5)
    case = {"features": features, "token_ids": token_ids, "logits": seen["lm_head"][0], "states": states}
    drafted, chain_logits, chain_states = [], [], []
    for _ in range(NUM_DRAFTED):
        best = logits[-1].argmax()
        token = best if offsets is None else best + offsets[best]
        inputs, tokens = torch.cat([inputs, states[-1:]]), torch.cat([tokens, token[None]])
        logits, states = run_layers(model, inputs, tokens)
        drafted.append(token)
        chain_logits.append(logits[-1])
        chain_states.append(states[-1])
    return case | {
        "drafted_ids": torch.stack(drafted),
        "drafted_logits": torch.stack(chain_logits),
        "drafted_states": torch.stack(chain_states),
    }


def run_layers(model: Any, inputs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and next features of all rows, from what enters the first layer beside the embeddings."""
    rows = torch.arange(len(token_ids))
    positions = 1 + rows[None]  # as the library numbers them; rotation knows only distances
    hidden = torch.cat([model.embed_tokens(token_ids), inputs], dim=-1)[None]
    rotation = model.rotary_emb(hidden, positions)
    for index, layer in enumerate(model.layers):
        is_visible = rows <= rows[:, None]
        if index in model.sliding_window_indices:
            is_visible &= rows > rows[:, None] - model.sliding_window
        mask = torch.zeros(is_visible.shape).masked_fill(~is_visible, -torch.inf)[None, None]
        hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
    normed = model.norm(hidden)[0]
    return model.lm_head(normed), normed if model.config.norm_output else hidden[0]


def check(out: Path) -> bool:
    """Compare every case with Eyas; True if all are within the tolerance."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Eyas against speculators, float32, largest differences of {out}")
    for column in ("variant", "states", "logits", "drafted states", "drafted logits"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        target = write_target(Path(scratch))
        for file in sorted(out.glob("*.safetensors")):
            differences = compare(file.with_suffix(""), load_file(file), target)
            worst = max(worst, *differences)
            table.add_row(file.stem, *(f"{difference:.1e}" for difference in differences))
    Console().print(table)
    return bool(table.rows) and worst <= TOLERANCE


def write_target(folder: Path) -> Path:
    """As much of a target as a head looks at."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_TARGET_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shared = {name: torch.zeros(VOCAB_SIZE, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(shared, folder / "model.safetensors")
    return folder


def compare(folder: Path, case: dict[str, Tensor], target: Path) -> tuple[float, float, float, float]:
    """Largest differences of states and logits of the first pass, and of the drafted chain."""
    from eyas.models.config import DecoderConfig
    from eyas.models.eagle3 import Eagle3Head
    from eyas.models.head_loading import load_head
    from eyas.models.target_weights import TargetWeights
    from eyas.workers.kv_pool import KVPool, PoolLayout
    from eyas.workers.paged_attention import PagedAttention, text_attention

    weights = TargetWeights(target, DecoderConfig.from_folder(target))
    head = load_head(folder, weights, torch.float32, torch.device("cpu"))
    if not isinstance(head, Eagle3Head):
        raise ValueError(f"{folder}: expected an EAGLE-3 head, found {type(head).__name__}")
    cache = head.config.layers.cache
    num_rows = NUM_PAIRS + NUM_DRAFTED
    pool = KVPool(
        PoolLayout(num_rows, 1), cache.num_layers, cache.num_kv_heads, cache.head_dim, head.dtype, head.device
    )

    def attention(start: int, stop: int) -> PagedAttention:
        return text_attention(pool, cache.num_heads, torch.arange(stop), start)

    with torch.inference_mode():
        positions = torch.arange(num_rows)
        states = head.extend(case["features"], case["token_ids"], positions[:NUM_PAIRS], attention(0, NUM_PAIRS))
        first = (difference(states, case["states"]), difference(head.logits(states), case["logits"]))
        drafted, state = [], states[-1:]
        for row, token in enumerate(case["drafted_ids"], start=NUM_PAIRS):
            state = head.step(state, token[None], positions[row : row + 1], attention(row, row + 1))
            drafted.append(state)
        chain = torch.cat(drafted)
        later = (
            difference(chain, case["drafted_states"]),
            difference(head.logits(chain), case["drafted_logits"]),
        )
    return *first, *later


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("dump", "check"))
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.mode == "dump":
        dump(arguments.out)
    elif not check(arguments.out):
        sys.exit(1)


if __name__ == "__main__":
    main()
