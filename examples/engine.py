"""Continuous batching in small: a few slots share one pool of pages and one compiled decode step.

Everything that changes while text grows is data (block tables, lengths, tokens), so the step compiles once: a
sequence that ends leaves an empty slot of length 0, a new one takes the slot, and nothing is traced again.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from llama import Llama

import splitk_jax as sk

NO_PAGE = -1  # table entry without a page: a write through it is dropped


def sample(logits: jax.Array, positions: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Next token i32[batch] of logits f32[batch, vocab_size]; temperature 0 takes the largest logit.

    A row's key comes from its slot and position, so its text does not depend on what it is batched with.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample_row(row_logits, slot, position):
        row_key = jax.random.fold_in(jax.random.fold_in(key, slot), position)
        return jax.random.categorical(row_key, row_logits / temperature).astype(jnp.int32)

    return jax.vmap(sample_row)(logits, jnp.arange(logits.shape[0]), positions)


def prefill_step(
    model: Llama,
    tokens: jax.Array,
    pages: list[sk.KVPages],
    block_tables: jax.Array,
    prompt_lens: jax.Array,
    key: jax.Array,
    *,
    temperature: float,
) -> tuple[jax.Array, jax.Array, list[sk.KVPages]]:
    """Writes whole prompts to the pages and chooses the token after each.

    Args:
      model: the decoder.
      tokens: i32[batch, max_prompt_len]. Prompts, padded on the right.
      pages: one KVPages a layer.
      block_tables: i32[batch, max_pages_per_seq].
      prompt_lens: i32[batch]. Tokens of each prompt; a row of 0 writes nothing.
      key: of the sampling.
      temperature: of the sampling; static.

    Returns:
      The next token i32[batch], its logits f32[batch, vocab_size], and the pages.
    """
    places = jnp.arange(tokens.shape[1])[None, :]
    positions = jnp.where(places < prompt_lens[:, None], places, -1)
    hidden, pages = model(tokens, positions, pages, block_tables, prompt_lens)
    last = jnp.maximum(prompt_lens - 1, 0)
    logits = model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    return sample(logits, last, key, temperature), logits, pages


def decode_step(
    model: Llama,
    tokens: jax.Array,
    pages: list[sk.KVPages],
    block_tables: jax.Array,
    seq_lens: jax.Array,
    key: jax.Array,
    *,
    plan: sk.DecodePlan | None,
    temperature: float,
) -> tuple[jax.Array, jax.Array, list[sk.KVPages]]:
    """Writes the newest token of each row to the pages and chooses the one after it.

    Args:
      model: the decoder.
      tokens: i32[batch]. The newest token of each row.
      pages: one KVPages a layer.
      block_tables: i32[batch, max_pages_per_seq].
      seq_lens: i32[batch]. Tokens of each row with the newest one; 0 is an empty slot.
      key: of the sampling.
      plan: of paged_decode_attention; None for dense attention.
      temperature: of the sampling; static.

    Returns:
      The next token i32[batch], its logits f32[batch, vocab_size], and the pages.
    """
    positions = seq_lens - 1  # -1 in an empty slot, which writes nothing
    hidden, pages = model(tokens[:, None], positions[:, None], pages, block_tables, seq_lens, plan)
    logits = model.logits(hidden[:, 0])
    return sample(logits, positions, key, temperature), logits, pages


class Engine:
    """Slots, their pages, and the two compiled steps.

    Args:
      model: the decoder.
      plan: of the decode steps; None for dense attention.
      num_slots: rows of the batch.
      num_pages: pages of the pool, in each layer.
      page_size: tokens of a page.
      max_prompt_len: tokens; prompts are padded to it.
      max_seq_len: tokens of prompt and answer together.
      dtype: of the cache.
      temperature: of the sampling; 0 is greedy.
      seed: of the sampling.
    """

    def __init__(
        self,
        model: Llama,
        plan: sk.DecodePlan | None,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_prompt_len: int,
        max_seq_len: int,
        dtype: DTypeLike = jnp.float32,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        config = model.config
        # Split once: JAX walks a flat state faster than a tree of modules at every call of the step.
        graph, self.weights = nnx.split(model)
        self.max_prompt_len = max_prompt_len
        self.page_size = page_size
        self.allocator = sk.PageAllocator(num_pages)
        self.pages = [
            sk.KVPages.init(
                num_pages=num_pages,
                page_size=page_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
            )
            for _ in range(config.num_layers)
        ]
        self.tokens = np.zeros(num_slots, np.int32)  # the newest token of each slot, not yet in the pages
        self.seq_lens = np.zeros(num_slots, np.int32)  # tokens in the pages; 0: the slot is empty
        self.block_tables = np.full((num_slots, -(-max_seq_len // page_size)), NO_PAGE, np.int32)
        self.key = jax.random.key(seed)
        self.num_prefill_traces = 0
        self.num_decode_traces = 0

        def prefill(weights, *args):
            self.num_prefill_traces += 1  # a Python side effect: runs when JAX traces, not when the step runs
            return prefill_step(nnx.merge(graph, weights), *args, temperature=temperature)

        def decode(weights, *args):
            self.num_decode_traces += 1
            return decode_step(nnx.merge(graph, weights), *args, plan=plan, temperature=temperature)

        # The pages are donated: XLA writes the new tokens in place instead of copying the pool every step.
        self.compiled_prefill = jax.jit(prefill, donate_argnums=2)
        self.compiled_decode = jax.jit(decode, donate_argnums=2)

    def prefill(self, prompts: dict[int, list[int]]) -> tuple[np.ndarray, jax.Array]:
        """Puts prompts into empty slots, all in one padded batch; the other slots stay as they are.

        Returns:
          The newest token of every slot i32[num_slots], and logits f32[num_slots, vocab_size]: those of these slots.

        Raises:
          OutOfPages: the pool has too few pages; nothing is taken.
          ValueError: a slot that holds a sequence, an empty prompt or one longer than max_prompt_len.
        """
        padded = np.zeros((len(self.seq_lens), self.max_prompt_len), np.int32)
        prompt_lens = np.zeros_like(self.seq_lens)
        for slot, prompt in prompts.items():
            if self.seq_lens[slot]:
                raise ValueError(f"slot {slot} holds a sequence: release it first")
            if not 0 < len(prompt) <= self.max_prompt_len:
                raise ValueError(f"the prompt of slot {slot} has {len(prompt)} tokens, not 1 to {self.max_prompt_len}")
            padded[slot, : len(prompt)] = prompt
            prompt_lens[slot] = len(prompt)
        try:
            for slot, prompt in prompts.items():
                self._reserve(slot, len(prompt))
        except sk.OutOfPages:
            for slot in prompts:  # all or none: a prompt that waits holds no pages
                self.release(slot)
            raise
        tokens, logits, self.pages = self.compiled_prefill(
            self.weights, padded, self.pages, self.block_tables, prompt_lens, self.key
        )
        new = prompt_lens > 0
        self.seq_lens[new] = prompt_lens[new]
        self.tokens[new] = np.asarray(tokens)[new]
        return self.tokens.copy(), logits

    def decode(self) -> tuple[np.ndarray, jax.Array]:
        """Decodes one token in every slot that holds a sequence.

        Returns:
          The newest token of every slot i32[num_slots], and the logits f32[num_slots, vocab_size] that chose it.

        Raises:
          OutOfPages: the pool has too few pages; release a slot and call again.
          ValueError: a sequence would pass max_seq_len.
        """
        for slot, length in enumerate(self.seq_lens.tolist()):
            if length:
                self._reserve(slot, length + 1)
        self.seq_lens[self.seq_lens > 0] += 1
        tokens, logits, self.pages = self.compiled_decode(
            self.weights, self.tokens, self.pages, self.block_tables, self.seq_lens, self.key
        )
        self.tokens = np.array(tokens)
        return self.tokens.copy(), logits

    def release(self, slot: int) -> None:
        """Ends the sequence of a slot: its pages go back to the pool and the slot is empty."""
        self.allocator.free([int(page) for page in self.block_tables[slot] if page != NO_PAGE])
        self.block_tables[slot] = NO_PAGE
        self.seq_lens[slot] = 0

    def generate(
        self, prompts: dict[int, list[int]], *, max_new_tokens: int, eos_id: int
    ) -> Iterator[tuple[dict[int, int], jax.Array]]:
        """Decodes prompts together; each row ends at eos_id or after max_new_tokens, the others go on.

        Yields:
          The new token of each live slot, and the logits f32[num_slots, vocab_size] that chose it.
        """
        tokens, logits = self.prefill(prompts)
        live = sorted(prompts)
        try:
            for remaining in reversed(range(max_new_tokens)):
                yield {slot: int(tokens[slot]) for slot in live}, logits
                for slot in [slot for slot in live if tokens[slot] == eos_id]:
                    self.release(slot)
                    live.remove(slot)
                if not live or not remaining:
                    return
                tokens, logits = self.decode()
        finally:
            for slot in live:
                self.release(slot)

    def _reserve(self, slot: int, length: int) -> None:
        """Gives a slot the pages that `length` tokens need and it does not have yet."""
        held = int(np.count_nonzero(self.block_tables[slot] != NO_PAGE))
        needed = -(-length // self.page_size)
        if needed > self.block_tables.shape[1]:
            raise ValueError(
                f"slot {slot} needs {needed} pages for {length} tokens, its table has {self.block_tables.shape[1]}: "
                "release it, or make the engine with a larger max_seq_len"
            )
        self.block_tables[slot, held:needed] = self.allocator.allocate(needed - held)
