"""The shape of a decoder: everything that decides which parameters exist and how they are used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Qwen3-shaped decoder; with ``qk_norm`` off it is Llama's shape, with ``attention_bias`` on as well, Qwen2's.

    ``ValueError`` from the constructor names the field, what was seen and what to do.

    >>> DecoderConfig(vocab_size=384, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    ...               intermediate_size=192).parameter_count
    209536
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm: bool = True
    """RMSNorm over ``head_dim`` of each query and key head, before rotation (Qwen3)."""
    attention_bias: bool = False
    """Biases on the q, k and v projections, none on the output projection (Qwen2)."""
    max_position_embeddings: int = 32_768
    """Longest sequence the model is meant for; the engine refuses longer ones."""
    embedding_init_std: float = 0.1
    weight_init_std: float | None = None
    """Standard deviation of every other matrix; None draws from N(0, fan_in^-1/2)."""
    zero_output_projections: bool = True
    """Start ``o_proj`` and ``down_proj`` at zero, so that each block begins as the identity. A small model learns to
    copy many times sooner this way."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids that exist in the vocabulary but must never be sampled (padding). Their logits are ``SUPPRESSED_LOGIT`` for
    the sampler and the learner alike, so that both normalise over the same set."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"DecoderConfig.{name} is {value!r}; give a whole number of at least 1")
        for name in ("rope_theta", "rms_norm_eps", "embedding_init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DecoderConfig.{name} is {getattr(self, name)!r}; give a number above 0")
        if self.weight_init_std is not None and not self.weight_init_std > 0:
            raise ValueError(
                f"DecoderConfig.weight_init_std is {self.weight_init_std!r}; give a number above 0, "
                "or None for fan_in^-1/2"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig.num_heads ({self.num_heads}) is no multiple of num_kv_heads ({self.num_kv_heads}); "
                "each key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"DecoderConfig.head_dim is {self.head_dim}; rotary embeddings need an even number")
        bad = [i for i in self.suppressed_ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(
                f"DecoderConfig.suppressed_ids holds {bad}; ids of this vocabulary are 0..{self.vocab_size - 1}"
            )
        if len(set(self.suppressed_ids)) >= self.vocab_size:
            raise ValueError("DecoderConfig.suppressed_ids suppresses the whole vocabulary; leave at least one id")

    @property
    def parameter_count(self) -> int:
        """Number of scalar parameters, tied embeddings counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention += 2 * self.head_dim * self.qk_norm
        attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads) * self.attention_bias
        block = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * block + self.hidden_size
