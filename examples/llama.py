"""Llama in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings.

One `Attention` serves three ways to run the model: without a cache (plain forward), densely over the
pages (`plan=None`: prefill, and the check), and through `paged_decode_attention` (one token a row).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

import splitk_jax as sk


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    num_layers: int
    hidden_dim: int
    mlp_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_epsilon: float
    max_context: int  # tokens


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates x [batch, T, heads, head_dim] by its positions i32[batch, T], in float32.

    The pair (2i, 2i+1) turns together: a GGUF file stores the rows of the Q and K projections in this
    interleaved order, where Hugging Face's checkpoints pair (i, i + head_dim/2). Scores q.k are the same.
    """
    frequencies = theta ** -(np.arange(0, x.shape[-1], 2, dtype=np.float32) / x.shape[-1])
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # [batch, T, 1, head_dim / 2]
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array) -> jax.Array:
    """Causal attention with the whole score matrix; key s of a row is at position s of its sequence.

    Args:
      q: [batch, T, num_q_heads, head_dim].
      k: [batch, S, num_kv_heads, head_dim].
      v: [batch, S, num_kv_heads, head_dim].
      q_positions: i32[batch, T]. Query t sees the keys 0 .. q_positions[t].
    """
    batch, q_len, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    grouped_q = q.reshape(batch, q_len, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped_q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    visible = jnp.arange(k.shape[1])[None, None, :] <= q_positions[:, :, None]  # [batch, T, S]
    # A padding query (position -1) sees nothing: a finite mask keeps its unused output from being NaN.
    scores = jnp.where(visible[:, None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(features_in, features_out, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.config = config
        self.q_proj = linear(config.hidden_dim, config.num_q_heads * config.head_dim)
        self.k_proj = linear(config.hidden_dim, config.num_kv_heads * config.head_dim)
        self.v_proj = linear(config.hidden_dim, config.num_kv_heads * config.head_dim)
        self.o_proj = linear(config.num_q_heads * config.head_dim, config.hidden_dim)

    def __call__(self, x, positions, pages, block_tables, seq_lens, plan):
        config = self.config
        batch, q_len, _ = x.shape
        q = self.q_proj(x).reshape(batch, q_len, config.num_q_heads, config.head_dim)
        k = self.k_proj(x).reshape(batch, q_len, config.num_kv_heads, config.head_dim)
        v = self.v_proj(x).reshape(batch, q_len, config.num_kv_heads, config.head_dim)
        q, k = rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta)

        if pages is None:
            out = dense_attention(q, k, v, positions)
        else:
            pages = pages.append(k, v, block_tables, positions)
            if plan is None:
                k, v = pages.to_contiguous(block_tables, seq_lens)
                out = dense_attention(q, k, v, positions)
            else:
                out = sk.paged_decode_attention(q, pages.k_pages, pages.v_pages, block_tables, seq_lens, plan=plan)
        return self.o_proj(out.reshape(batch, q_len, -1)), pages


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(features_in, features_out, use_bias=False, param_dtype=dtype, rngs=rngs)

        self.gate_proj = linear(config.hidden_dim, config.mlp_dim)
        self.up_proj = linear(config.hidden_dim, config.mlp_dim)
        self.down_proj = linear(config.mlp_dim, config.hidden_dim)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.hidden_dim, epsilon=config.norm_epsilon, param_dtype=dtype, rngs=rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.hidden_dim, epsilon=config.norm_epsilon, param_dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, positions, pages, block_tables, seq_lens, plan):
        out, pages = self.attention(self.attention_norm(x), positions, pages, block_tables, seq_lens, plan)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), pages


class Llama(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.hidden_dim, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_dim, epsilon=config.norm_epsilon, param_dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        pages: list[sk.KVPages] | None = None,
        block_tables: jax.Array | None = None,
        seq_lens: jax.Array | None = None,
        plan: sk.DecodePlan | None = None,
    ) -> tuple[jax.Array, list[sk.KVPages]]:
        """Runs the layers, writing each token's K and V to the pages before attending to them.

        Args:
          tokens: i32[batch, T].
          positions: i32[batch, T]. Place of each token in its sequence; -1 is padding and writes nothing.
          pages: one KVPages a layer, or None to attend to `tokens` alone, which then start at position 0.
          block_tables: i32[batch, max_pages_per_seq]. Page of each logical page.
          seq_lens: i32[batch]. Tokens of each row, the new ones included; 0 is an empty slot.
          plan: decode through paged_decode_attention with this plan; None attends densely.

        Returns:
          Hidden states [batch, T, hidden_dim], and the pages with the new tokens (empty without pages).
        """
        x = self.embedding(tokens)
        new_pages = []
        for block, layer_pages in zip(self.blocks, pages or [None] * len(self.blocks), strict=True):
            x, layer_pages = block(x, positions, layer_pages, block_tables, seq_lens, plan)
            if layer_pages is not None:
                new_pages.append(layer_pages)
        return self.norm(x), new_pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., vocab_size]; the output matrix is the embedding table."""
        table = self.embedding.embedding[...]
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
