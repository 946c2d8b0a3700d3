"""A random target of a few thousand weights with a tokenizer, and random texts, for a dry run of the training."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.training.shard import Shard, save_shard

_VOCAB, _HIDDEN, _LAYERS = 96, 32, 6
_STOP = 2


def write_tiny_target(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, intermediate_size=48, num_hidden_layers=_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=_STOP,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(_VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{_STOP}").save_pretrained(folder)


def write_tiny_corpus(folder: Path, num_conversations: int = 24) -> None:
    """Conversations of texts only, the second half of each an answer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = torch.randint(12, 40, (num_conversations,), generator=generator).tolist()
    token_ids = torch.randint(_STOP + 1, _VOCAB, (sum(lengths),), generator=generator)
    is_answer = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    save_shard(Shard(token_ids, is_answer, lengths, None), folder / "shard-00000.safetensors")
