"""Small models of random weights for the soak: one for each kind of pool, each well below half a billion parameters."""

from __future__ import annotations

from typing import Any

from shapes import MODELS, Model

VOCABULARY = 32000
_EVERY = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
_LLAMA = MODELS["small"].config

# The head of the target model in one layer, as EAGLE has it.
EAGLE = {**_LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}

# Ranks and head sizes are those of the real model, because kernels are made for them. Every layer is dense: experts
# have nothing to do with KV.
DEEPSEEK_LAYERS = 6
DEEPSEEK: dict[str, Any] = {
    **_EVERY,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": DEEPSEEK_LAYERS,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "first_k_dense_replace": DEEPSEEK_LAYERS,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
}

GPT_OSS_LAYERS = 8
GPT_OSS: dict[str, Any] = {
    **_EVERY,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": GPT_OSS_LAYERS,
    "layer_types": ["sliding_attention", "full_attention"] * (GPT_OSS_LAYERS // 2),
    "sliding_window": 128,
    "hidden_size": 512,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "initializer_range": 0.02,
    "rope_theta": 150000.0,
    "rope_scaling": {**_YARN, "truncate": False},
}

FALCON_H1: dict[str, Any] = {
    **_EVERY,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "rope_theta": 100000.0,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}

SOAK_MODELS: dict[str, Model] = {
    "llama": MODELS["small"],
    "eagle": Model(EAGLE, {}),
    "mla": Model(DEEPSEEK, {}),
    "swa": Model(GPT_OSS, {}),
    "hybrid": Model(FALCON_H1, {}),
    "tiny": MODELS["tiny"],
}
