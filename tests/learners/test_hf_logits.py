"""The decoder computes what ``transformers`` does: golden logits drawn once, and live ones where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from palaestra.learners.models.decoder import Decoder, packed_attention
from palaestra.learners.models.hf import from_hf_tensors, save_folder
from palaestra.learners.models.hf_config import config_from_hf

GOLDEN = json.loads((Path(__file__).parent / "fixtures" / "hf_logits.json").read_text())
FAMILIES = sorted(GOLDEN["families"])


def golden_decoder(family: dict[str, Any]) -> Decoder:
    rng = np.random.default_rng(0)
    tensors = {}
    for name in sorted(family["tensors"]):
        draw = rng.standard_normal(family["tensors"][name])
        tensors[name] = (1 + 0.1 * draw if "norm" in name else 0.3 * draw).astype(np.float32)
    return from_hf_tensors(config_from_hf(family["config"]), tensors, tensors.__getitem__)


def logits_of(model: Decoder, ids: list[int]) -> np.ndarray:
    ids_bt = jnp.asarray([ids], jnp.int32)
    positions_bt = jnp.arange(len(ids))[None]
    return np.asarray(model.logits(model.hidden(ids_bt, positions_bt, packed_attention(jnp.ones_like(ids_bt)))))[0]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_equal_the_golden_ones_of_transformers(architecture: str) -> None:
    family = GOLDEN["families"][architecture]
    found = logits_of(golden_decoder(family), GOLDEN["ids"])
    np.testing.assert_allclose(found, family["logits"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_transformers_reads_an_exported_folder_and_computes_the_same_logits(architecture: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = golden_decoder(GOLDEN["families"][architecture])
    save_folder(model, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([GOLDEN["ids"]])).logits[0].numpy()
    np.testing.assert_allclose(logits_of(model, GOLDEN["ids"]), expected, atol=1e-4)
