"""Hugging Face folders in and out: ``config.json`` and safetensors, as ``transformers`` and SGLang read them.

``suppressed_ids`` is kept under the key ``palaestra`` of config.json, which other readers ignore (give SGLang a
``logit_bias`` instead). How the weights were initialised is not kept.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.hf_config import config_from_hf, config_to_hf
from palaestra.learners.models.parameters import Params, named_leaves, path_name

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head_kernel": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "attention/q_kernel": "self_attn.q_proj.weight",
    "attention/k_kernel": "self_attn.k_proj.weight",
    "attention/v_kernel": "self_attn.v_proj.weight",
    "attention/o_kernel": "self_attn.o_proj.weight",
    "attention/q_bias": "self_attn.q_proj.bias",
    "attention/k_bias": "self_attn.k_proj.bias",
    "attention/v_bias": "self_attn.v_proj.bias",
    "attention/q_norm": "self_attn.q_norm.weight",
    "attention/k_norm": "self_attn.k_norm.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
    "feed_forward/gate_kernel": "mlp.gate_proj.weight",
    "feed_forward/up_kernel": "mlp.up_proj.weight",
    "feed_forward/down_kernel": "mlp.down_proj.weight",
}


def hf_name(name: str) -> str:
    """``layers/0/attention/q_kernel`` -> ``model.layers.0.self_attn.q_proj.weight``."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, rest = name.split("/", 2)
    return f"model.layers.{layer}.{_BLOCK_NAMES[rest]}"


def to_hf_tensors(params: Params) -> dict[str, NDArray[Any]]:
    """A decoder's parameters under their Hugging Face names; kernels become [out, in], as PyTorch keeps them."""
    return {
        hf_name(name): np.ascontiguousarray(_transposed_if_kernel(name, np.asarray(leaf)))
        for name, leaf in named_leaves(params).items()
    }


def from_hf_tensors(config: DecoderConfig, names: Collection[str], read: Callable[[str], Any]) -> Decoder:
    """Build a float32 decoder from Hugging Face tensors, fetching each once through ``read(name)``.

    Raises ``ValueError`` listing every missing or unknown name, or every tensor whose shape does not fit.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    _check_names({hf_name(name) for name in named_leaves(abstract)}, set(names), config)
    misfits: list[str] = []

    def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path)
        array: jax.Array = _transposed_if_kernel(name, jnp.asarray(read(hf_name(name)), jnp.float32))
        if array.shape != leaf.shape:
            misfits.append(f"{hf_name(name)} {array.shape} instead of {leaf.shape}")
        return array

    params = jax.tree_util.tree_map_with_path(load, abstract)
    if misfits:
        raise ValueError(
            f"the weights do not fit config.json (shapes with kernels as [in, out]): {'; '.join(misfits)}; "
            "use the config.json that came with these weights"
        )
    return nnx.merge(graphdef, params)


def save_folder(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    extra_config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` so that the whole folder appears at once or not at all.

    ``extra_config`` adds keys to config.json (``eos_token_id``); ``files`` adds files (``tokenizer.json``). Raises
    ``FileExistsError`` where the folder exists and ``overwrite`` is off, ``ValueError`` for an ``extra_config`` key
    that the model's shape decides.
    """
    target = Path(folder)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; choose another folder or pass overwrite=True")
    config = config_to_hf(model.config)
    clash = sorted(set(config) & set(extra_config or {}))
    if clash:
        raise ValueError(
            f"extra_config may not set {', '.join(clash)}: the model's shape decides those; leave them out"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        text = json.dumps({**config, **(extra_config or {})}, indent=2) + "\n"
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
        save_file(to_hf_tensors(nnx.state(model, nnx.Param)), staging / WEIGHTS_FILE, metadata={"format": "pt"})
        for name, content in (files or {}).items():
            (staging / name).write_bytes(content)
        staging.chmod(0o755)
        _put_in_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_folder(folder: str | os.PathLike[str]) -> Decoder:
    """Read a Hugging Face folder (one safetensors file, or shards with an index) into a float32 decoder.

    Raises ``FileNotFoundError`` naming the file that is missing, and ``ValueError`` for a config or tensors that this
    decoder cannot represent.
    """
    root = Path(folder)
    config = load_config(root)
    with ExitStack() as stack:
        tensor_files: dict[str, Any] = {}
        for path in _weight_files(root):
            try:
                handle = stack.enter_context(safe_open(path, framework="flax"))
            except SafetensorError as error:
                raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from error
            tensor_files |= dict.fromkeys(handle.keys(), handle)
        return from_hf_tensors(config, tensor_files, lambda name: tensor_files[name].get_tensor(name))


def load_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Read ``config.json`` alone. Raises as :func:`load_folder` does."""
    return config_from_hf(_read_json(Path(folder) / CONFIG_FILE))


def _weight_files(root: Path) -> list[Path]:
    index = root / INDEX_FILE
    if not index.is_file():
        paths = [root / WEIGHTS_FILE]
    else:
        paths = [root / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"missing weights: {', '.join(missing)}; the folder is incomplete, download it again")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give a Hugging Face folder with {CONFIG_FILE} and safetensors")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); download the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; download the file again")
    return content


def _check_names(wanted: set[str], found: set[str], config: DecoderConfig) -> None:
    ignorable = {"lm_head.weight"} if config.tie_word_embeddings else set()
    problems = []
    if missing := sorted(wanted - found):
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unknown := sorted(found - wanted - ignorable):
        problems.append(f"unknown tensors: {', '.join(unknown)}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}; the weights and config.json belong to different models")


def _transposed_if_kernel(name: str, array: Any) -> Any:
    return array.T if name.endswith("_kernel") else array


def _put_in_place(staging: Path, target: Path) -> None:
    """A folder cannot be renamed onto a full one, so the old one steps aside first; it comes back if that fails."""
    if not target.exists():
        staging.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        target.rename(aside / target.name)
        try:
            staging.rename(target)
        except OSError:
            (aside / target.name).rename(target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
