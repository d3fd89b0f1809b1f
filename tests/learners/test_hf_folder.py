from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from palaestra.learners.models import hf
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.hf import load_config, load_folder, save_folder
from palaestra.learners.models.hf_config import config_from_hf, config_to_hf
from palaestra.learners.models.parameters import fingerprint

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 23,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def print_of(model: Decoder) -> str:
    return fingerprint(nnx.state(model, nnx.Param))


def fail(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


@pytest.fixture
def folder(tiny_model: Decoder, tmp_path: Path) -> Path:
    save_folder(tiny_model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": False},
        {"qk_norm": False, "attention_bias": True},
        {"qk_norm": False, "rope_theta": 5e5, "suppressed_ids": ()},
    ],
    ids=["qwen3", "untied", "qwen2", "llama"],
)
def test_a_saved_model_comes_back_bit_for_bit(
    shape: dict[str, Any], tiny_config: DecoderConfig, tmp_path: Path
) -> None:
    fields = {name: getattr(tiny_config, name) for name in DecoderConfig.__dataclass_fields__}
    model = Decoder(DecoderConfig(**(fields | shape)), rngs=nnx.Rngs(3))
    save_folder(model, tmp_path / "model")
    loaded = load_folder(tmp_path / "model")
    assert print_of(loaded) == print_of(model)
    assert config_to_hf(loaded.config) == config_to_hf(model.config)


def test_shards_with_an_index_are_read_as_one(folder: Path, tiny_model: Decoder) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    assert print_of(load_folder(folder)) == print_of(tiny_model)
    (folder / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing weights: .*b\.safetensors"):
        load_folder(folder)


def test_half_precision_weights_are_read_into_float32(folder: Path, tiny_model: Decoder) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    embedding = load_folder(folder).embedding[...]
    assert embedding.dtype == np.float32
    np.testing.assert_allclose(embedding, tiny_model.embedding[...], rtol=1e-3)


def test_missing_and_unknown_tensors_are_all_listed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.extra"] = np.zeros(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm") as e:
        load_folder(folder)
    assert "unknown tensors: model.layers.2.extra" in str(e.value)


def test_a_tied_model_may_bring_the_head_it_does_not_need(folder: Path, tiny_model: Decoder) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    assert print_of(load_folder(folder)) == print_of(tiny_model)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((13, 8), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj.weight \(8, 13\) instead of \(8, 12\)"):
        load_folder(folder)


def test_missing_and_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_folder(tmp_path / "nowhere")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load_folder(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"missing weights: .*model\.safetensors"):
        load_folder(folder)
    (folder / "config.json").write_text('{"vocab_size": 3,\n oops}')
    with pytest.raises(ValueError, match=r"config\.json:2: not valid JSON"):
        load_config(folder)


def test_a_write_that_fails_leaves_nothing_behind(
    tiny_model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_folder(tiny_model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_only_on_request_and_survives_a_failed_replacement(
    folder: Path, tiny_model: Decoder, tiny_config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Decoder(tiny_config, rngs=nnx.Rngs(9))
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save_folder(other, folder)
    with monkeypatch.context() as patched:
        patched.setattr(hf, "save_file", fail)
        with pytest.raises(OSError, match="No space left"):
            save_folder(other, folder, overwrite=True)
    assert print_of(load_folder(folder)) == print_of(tiny_model)
    save_folder(other, folder, overwrite=True)
    assert print_of(load_folder(folder)) == print_of(other)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_tokenizer_and_extra_keys_go_into_the_same_folder(tiny_model: Decoder, tmp_path: Path) -> None:
    save_folder(tiny_model, tmp_path / "m", extra_config={"eos_token_id": 4}, files={"tokenizer.json": b"{}"})
    assert json.loads((tmp_path / "m" / "config.json").read_text())["eos_token_id"] == 4
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == b"{}"
    with pytest.raises(ValueError, match="extra_config may not set hidden_size"):
        save_folder(tiny_model, tmp_path / "n", extra_config={"hidden_size": 9})


def test_suppressed_ids_survive_the_folder(folder: Path) -> None:
    assert load_config(folder).suppressed_ids == (0,)


def test_a_config_in_the_newer_style_keeps_its_rotary_base() -> None:
    raw = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    assert config_from_hf(raw).rope_theta == 123.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "names the architecture 'GPT2LMHeadModel'; this decoder reads Qwen3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' rope scaling"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "bias on o_proj"),
        ({"vocab_size": None}, "lacks vocab_size"),
    ],
)
def test_what_the_decoder_cannot_represent_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(QWEN3 | change)


def test_a_shape_that_no_architecture_has_cannot_be_exported(tiny_config: DecoderConfig) -> None:
    fields = {name: getattr(tiny_config, name) for name in DecoderConfig.__dataclass_fields__}
    with pytest.raises(ValueError, match="turn one of them off to export it"):
        config_to_hf(DecoderConfig(**(fields | {"attention_bias": True})))
