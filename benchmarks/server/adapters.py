"""LoRA adapters of random weights for the models of the demonstration, wide enough to change what is answered."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvcanary_plugin.demo.model import TINY, Shape

RANK = 4


def make_adapter(folder: Path, model: Path, seed: int, shape: Shape = TINY) -> Path:
    """Write an adapter of queries, keys and values in the layout of PEFT, bfloat16, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    head = shape.hidden // shape.heads
    widths = {"q_proj": shape.heads * head, "k_proj": shape.kv_heads * head, "v_proj": shape.kv_heads * head}
    weights = {}
    for layer in range(shape.layers):
        for name, width in widths.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, shape.hidden, generator=random).bfloat16()
            weights[f"{module}.lora_B.weight"] = torch.randn(width, RANK, generator=random).bfloat16()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(model)}))
    return folder
