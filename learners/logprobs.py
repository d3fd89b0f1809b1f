"""Log-probs and entropies of given tokens, without ever holding an array of shape [batch, time, vocabulary]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from palaestra.learners.models.decoder import Decoder, packed_attention


def token_logprobs_and_entropy(
    model: Decoder,
    ids_bt: Array,
    positions_bt: Array,
    segment_ids_bt: Array,
    *,
    temperature: float = 1.0,
    logit_chunk_tokens: int = 512,
) -> tuple[Array, Array]:
    """For each token of packed rows, its log-prob given what stands before it, and the entropy of that distribution.

    Both [B, T] float32 of log_softmax(logits / temperature); 0 at t = 0. At the first token of a segment, which has
    nothing of its own before it, the value is meaningless: no mask may be 1 there. At most ``logit_chunk_tokens``
    tokens have their logits at one time, forward and backward: the backward pass computes each chunk's again.
    """
    batch, time = ids_bt.shape
    hidden_bte = model.hidden(ids_bt, positions_bt, packed_attention(segment_ids_bt))
    targets_bt = jnp.roll(ids_bt, -1, axis=1)
    tokens = batch * time
    chunks = -(-tokens // logit_chunk_tokens)
    chunk = -(-tokens // chunks)
    padding = chunks * chunk - tokens
    hidden_nce = jnp.pad(hidden_bte.reshape(tokens, -1), ((0, padding), (0, 0))).reshape(chunks, chunk, -1)
    targets_nc = jnp.pad(targets_bt.reshape(tokens), (0, padding)).reshape(chunks, chunk)

    @jax.checkpoint
    def of_chunk(operands: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_ce, targets_c = operands
        scores_cv = jax.nn.log_softmax(model.logits(hidden_ce) / temperature, axis=-1)
        logprobs_c = jnp.take_along_axis(scores_cv, targets_c[:, None], axis=-1)[:, 0]
        return logprobs_c, -jnp.sum(jnp.exp(scores_cv) * scores_cv, axis=-1)

    found = jax.lax.map(of_chunk, (hidden_nce, targets_nc))
    logprobs_bt, entropy_bt = (values.reshape(-1)[:tokens].reshape(batch, time) for values in found)
    return _shift_right(logprobs_bt), _shift_right(entropy_bt)


def _shift_right(values_bt: Array) -> Array:
    """What position t - 1 predicts belongs to token t."""
    return jnp.pad(values_bt[:, :-1], ((0, 0), (1, 0)))
