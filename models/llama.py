"""The Llama family (Llama, Mistral, Qwen2, Qwen3) as a plain module over flat token rows.

It knows nothing of batches, caches or pages: the runner passes an `Attention`. Any residual-stream states can be
captured for a draft head on the way.

Letters: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.attention import Attention
from eyas.models.checkpoint import Checkpoint
from eyas.models.config import DecoderConfig
from eyas.models.decoder import DecoderOutput
from eyas.models.layers import GatedMLP, RMSNorm, SelfAttention, summed
from eyas.models.linear import Linear
from eyas.models.parallel import TensorParallel
from eyas.models.rope import RotaryTable


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP over the residual stream, see `models.layers`."""

    def __init__(self, attention_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self, residual: Tensor, update: Tensor | None, rotation: tuple[Tensor, Tensor], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """`residual [T, H]` and what is still to be added to it, to the same after the layer."""
        normed, residual = self.attention_norm.add(residual, update)
        normed, residual = self.mlp_norm.add(residual, self.attention(normed, rotation, attention))
        return residual, self.mlp(normed)


class LlamaDecoder(nn.Module):
    """One tensor-parallel rank of a decoder. Embeddings are whole on every rank; the output projection is split."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        output: Linear,
        rotary: RotaryTable,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.output = output
        self.rotary = rotary
        self.parallel = parallel

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, capture: tuple[int, ...] = ()
    ) -> DecoderOutput:
        """See `Decoder`."""
        residual = F.embedding(token_ids, self.embedding)
        update: Tensor | None = None  # still to be added to the residual stream
        rotation = self.rotary.lookup(positions, residual.dtype)
        captured = {}
        for index, layer in enumerate(self.layers):
            if index in capture:
                residual, update = summed(residual, update), None
                captured[index] = residual
            residual, update = layer(residual, update, rotation, attention)
        if len(self.layers) in capture:
            residual, update = summed(residual, update), None
            captured[len(self.layers)] = residual
        hidden = captured[self.config.final_index] = self.norm.add(residual, update)[0]
        features = torch.cat([captured[index] for index in capture], dim=-1) if capture else None
        return DecoderOutput(hidden=hidden, features=features)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[T, H]` to full-vocabulary logits `[T, V]`, joined over ranks."""
        return self.parallel.concatenate(self.output(hidden))[:, : self.config.vocab_size]


def load_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device, parallel: TensorParallel | None = None
) -> LlamaDecoder:
    """Load one rank of the decoder in a Hugging Face safetensors folder.

    Raises:
        ValueError: naming the field or tensor that is wrong.
    """
    parallel = parallel or TensorParallel()
    config = DecoderConfig.from_folder(folder)
    config.check_tensor_parallel(parallel.size)
    reader = _RankReader(Checkpoint(folder), config, dtype, device, parallel)
    embedding = reader.whole("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings:
        head = embedding
    else:
        head = reader.whole("lm_head.weight", config.vocab_size, config.hidden_size)
    rows_per_rank = -(-config.vocab_size // parallel.size)
    head = F.pad(head, (0, 0, 0, rows_per_rank * parallel.size - config.vocab_size))
    decoder = LlamaDecoder(
        config=config,
        embedding=embedding,
        layers=[reader.layer(index) for index in range(config.num_layers)],
        norm=RMSNorm(reader.whole("model.norm.weight", config.hidden_size), config.rms_norm_eps),
        output=Linear(parallel.shard(head, 0).contiguous()),
        rotary=RotaryTable(config.raw, config.max_positions).to(device),
        parallel=parallel,
    )
    return decoder.eval()


@dataclass(frozen=True, slots=True)
class _RankReader:
    """Reads one rank's share of the tensors of each layer."""

    checkpoint: Checkpoint
    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel

    def whole(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.read(name, shape, self.dtype).to(self.device)

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}"
        hidden, head_dim = config.hidden_size, config.head_dim
        query_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention = SelfAttention(
            layer=index,
            qkv=self._columns(
                [f"{prefix}.self_attn.{part}_proj" for part in "qkv"], [query_rows, kv_rows, kv_rows], hidden
            ),
            output=self._rows(f"{prefix}.self_attn.o_proj", hidden, query_rows),
            num_heads=config.num_heads // self.parallel.size,
            num_kv_heads=config.num_kv_heads // self.parallel.size,
            head_dim=head_dim,
            q_norm=self._norm(f"{prefix}.self_attn.q_norm", head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{prefix}.self_attn.k_norm", head_dim) if config.qk_norm else None,
            parallel=self.parallel,
        )
        mlp = GatedMLP(
            gate_up=self._columns(
                [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], [config.intermediate_size] * 2, hidden
            ),
            down=self._rows(f"{prefix}.mlp.down_proj", hidden, config.intermediate_size),
            parallel=self.parallel,
        )
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            attention=attention,
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", hidden),
            mlp=mlp,
        )

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.whole(f"{name}.weight", size), self.config.rms_norm_eps)

    def _columns(self, names: list[str], rows: list[int], inputs: int) -> Linear:
        """Several projections of one input fused along their output rows, each split over the ranks first."""
        parts = [
            self.parallel.shard(self.checkpoint.read(f"{name}.weight", (count, inputs), self.dtype), 0)
            for name, count in zip(names, rows, strict=True)
        ]
        biases = [
            self.checkpoint.read_optional(f"{name}.bias", (count,), self.dtype)
            for name, count in zip(names, rows, strict=True)
        ]
        present = [bias for bias in biases if bias is not None]
        if present and len(present) != len(names):
            raise ValueError(f"{self.checkpoint.origin}: only some of {names} have a bias")
        bias = torch.cat([self.parallel.shard(bias, 0) for bias in present]).to(self.device) if present else None
        return Linear(torch.cat(parts).to(self.device), bias)

    def _rows(self, name: str, outputs: int, inputs: int) -> Linear:
        """A projection split along its inputs; its bias is added once, on rank 0, because ranks are summed."""
        weight = self.parallel.shard(self.checkpoint.read(f"{name}.weight", (outputs, inputs), self.dtype), 1)
        bias = self.checkpoint.read_optional(f"{name}.bias", (outputs,), self.dtype)
        if bias is not None:
            bias = bias.to(self.device) if self.parallel.rank == 0 else None
        return Linear(weight.contiguous().to(self.device), bias)
