"""``config.json`` to :class:`DecoderConfig` and back. What this decoder cannot represent is an error, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaestra.learners.models.config import DecoderConfig

# architecture -> (model_type, qk_norm, attention_bias)
FAMILIES = {
    "Qwen3ForCausalLM": ("qwen3", True, False),
    "Qwen2ForCausalLM": ("qwen2", False, True),
    "LlamaForCausalLM": ("llama", False, False),
}

# our field -> Hugging Face's key
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The content of ``config.json``. Raises ``ValueError`` for a shape that no supported architecture has."""
    shape = (config.qk_norm, config.attention_bias)
    architecture = next((name for name, family in FAMILIES.items() if family[1:] == shape), None)
    if architecture is None:
        raise ValueError(
            "a decoder with both qk_norm and attention_bias is no Hugging Face architecture "
            f"({', '.join(FAMILIES)}); turn one of them off to export it"
        )
    model_type = FAMILIES[architecture][0]
    written = {theirs: getattr(config, ours) for ours, theirs in _KEYS.items()}
    written |= {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if model_type != "qwen2":
        written["attention_bias"] = False
    if config.suppressed_ids:
        written["palaestra"] = {"suppressed_ids": list(config.suppressed_ids)}
    return written


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Understand ``config.json``. Raises ``ValueError`` naming the key that is missing or cannot be represented."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise ValueError(
            f"config.json names the architecture {architecture!r}; this decoder reads {', '.join(FAMILIES)}"
        )
    model_type, qk_norm, attention_bias = FAMILIES[architecture]
    _refuse_unsupported(raw, model_type)
    rope = raw.get("rope_parameters") or {}
    values: dict[str, Any] = {
        "num_key_value_heads": raw.get("num_attention_heads"),
        "head_dim": _default_head_dim(raw, model_type),
        "tie_word_embeddings": False,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        **{key: value for key, value in raw.items() if value is not None},
    }
    missing = [theirs for theirs in _KEYS.values() if values.get(theirs) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}; it is incomplete, download it again")
    suppressed = (raw.get("palaestra") or {}).get("suppressed_ids", ())
    return DecoderConfig(
        **{ours: values[theirs] for ours, theirs in _KEYS.items()},
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        suppressed_ids=tuple(suppressed),
    )


def _default_head_dim(raw: Mapping[str, Any], model_type: str) -> int | None:
    """Qwen3's own default is 128 whatever the width; the others divide the width by the heads."""
    if model_type == "qwen3":
        return 128
    width, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    return width // heads if width and heads else None


def _refuse_unsupported(raw: Mapping[str, Any], model_type: str) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"config.json asks for {rope_type!r} rope scaling; this decoder has plain rotary embeddings")
    if raw.get("use_sliding_window"):
        raise ValueError("config.json asks for sliding-window attention; this decoder attends to the whole sequence")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json asks for hidden_act {raw['hidden_act']!r}; this decoder has silu")
    if model_type != "qwen2" and raw.get("attention_bias"):
        raise ValueError("config.json asks for a bias on o_proj as well (attention_bias); this decoder has none there")
    if raw.get("mlp_bias"):
        raise ValueError("config.json asks for biases in the feed-forward (mlp_bias); this decoder has none there")
