"""Models of random weights, and what they are measured with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured: so many requests at once, prompt tokens and new tokens of each."""

    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Slots it needs at most."""
        return self.batch * (self.prompt + self.new)

    def to_fields(self, seed: str) -> dict[str, Any]:
        """What :func:`engine_worker.make_prompts` takes."""
        return {"batch": self.batch, "prompt": self.prompt, "new": self.new, "seed": seed}


@dataclass(frozen=True, slots=True)
class Model:
    """A model of random weights: its ``config.json``, the works it is measured with, and arguments for SGLang.

    Attributes:
        works: by name.
        chunk: most tokens of a prefill.
    """

    config: Mapping[str, Any]
    works: Mapping[str, Work]
    chunk: int = 8192

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return int(self.config["vocab_size"])

    def write(self, folder: Path) -> Path:
        """Write the configuration, from which SGLang makes weights of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


MODELS: dict[str, Model] = {
    "8b": Model(
        _llama(32, 4096, 32, 8, 14336, 32000),
        {"decode64": Work(64, 1024, 256), "prefill": Work(16, 8192, 1), "decode16": Work(16, 8192, 128)},
    ),
    "small": Model(_llama(24, 896, 14, 2, 4864, 32000), {"small": Work(1, 128, 512)}),
    "tiny": Model(
        _llama(4, 128, 4, 2, 256, 512), {"tiny-decode": Work(4, 32, 48), "tiny-prefill": Work(2, 256, 1)}, chunk=128
    ),
}
