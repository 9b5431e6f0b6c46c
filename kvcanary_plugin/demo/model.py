"""Small Llama models of random weights that matter.

SGLang's ``--load-format dummy`` draws weights so small that the output hardly depends on the KV: damage would change
nothing. Wider weights make every token depend on its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a model: layers, hidden size, query heads, KV heads, MLP size."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int


TINY = Shape(layers=4, hidden=128, heads=4, kv_heads=2, intermediate=256)
MEDIUM = Shape(layers=12, hidden=768, heads=12, kv_heads=12, intermediate=3072)
VOCABULARY = 512


def make_model(folder: Path, shape: Shape = TINY) -> Path:
    """Write config and weights to ``folder``, bfloat16, the same every time. Does nothing if they are there."""
    if (folder / "model.safetensors").exists():
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]

    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        intermediate_size=shape.intermediate,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> Path:
    """Give a model of :func:`make_model` words, which the OpenAI API needs: token 7 is the word ``t7``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    return folder
