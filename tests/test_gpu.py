"""What only a GPU can show: the reference backend's invariance and accuracy there, and the target found by its device.

Every other test runs on whatever JAX's default device is; these are the ones that a CPU cannot stand in for.
"""

import functools
import re

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import CONFIGS, Config, random_batches
from support import assert_close, assert_same_bits

import splitk_jax as sk
from splitk_jax.target import load_targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU as JAX's default device"),
]

SIZES = {
    "gqa-llama": Config(heads=(32, 8), head_dim=128, longest=2048, splits=33, min_kv_per_split=64),
    "gqa-llama-f32": Config(
        heads=(32, 8), head_dim=128, q_dtype="float32", longest=2048, splits=33, min_kv_per_split=64
    ),
    "mqa-page64": Config(heads=(64, 1), head_dim=64, page_size=64, q_dtype="float32", longest=2048, splits=64),
}
EVERY = [pytest.param(config, id=name) for name, config in (CONFIGS | SIZES).items()]


@pytest.mark.parametrize("config", EVERY)
def test_any_batch(config):
    assert random_batches(config, 30) == (1, 0)


@pytest.mark.parametrize("config", EVERY)
def test_against_dense(config):
    """float32 means float32: a TF32 product would miss the tolerance by two orders of magnitude."""
    battery.check_against_dense(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_width_and_pool(name):
    config = CONFIGS[name]
    rows = config.sequences(8, seed=3)
    alone = config.alone(rows)
    nothing = config.sequence(0, np.random.default_rng(0))
    for size in (16, 17, 33, 64):
        out, lse = config.decode([*rows, *[nothing] * (size - len(rows))])
        assert_same_bits((out[: len(rows)], lse[: len(rows)]), alone)
    assert_same_bits(config.decode(rows, width=8 * config.width), alone)
    assert_same_bits(config.decode(rows, num_pages=16 * (17 * config.width + 1)), alone)


def test_repeats_give_the_same_bits():
    config = SIZES["gqa-llama-f32"]
    paged = config.paged(config.sequences(60, seed=1), num_pages=60 * config.width + 1)
    arrays = [jnp.asarray(x) for x in paged.arrays]
    call = functools.partial(sk.paged_decode_attention, plan=config.plan, return_lse=True)
    expected = call(*arrays)
    for _ in range(200):
        assert_same_bits(call(*arrays), expected)


def test_no_pool_sized_temporary():
    """Neither reading nor writing the cache copies it."""
    config = SIZES["gqa-llama"]
    pages = sk.KVPages.init(num_pages=4096, page_size=16, num_kv_heads=8, head_dim=128)
    pool = pages.k_pages.nbytes
    q, new = jnp.zeros((4, 32, 128), jnp.bfloat16), jnp.zeros((4, 8, 128), jnp.bfloat16)
    tables, lens = jnp.zeros((4, 64), jnp.int32), jnp.ones(4, jnp.int32)

    def step(pages, q):
        pages = pages.append(new, new, tables, lens - 1)
        return pages, sk.paged_decode_attention(q, pages.k_pages, pages.v_pages, tables, lens, plan=config.plan)

    memory = jax.jit(step, donate_argnums=0).lower(pages, q).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * pool
    assert memory.temp_size_in_bytes < pool / 2


class TestDevice:
    def test_its_target_is_found_by_device_kind(self):
        device = jax.devices()[0]
        described = {kind for target in load_targets() for kind in target.device_kinds}
        if device.device_kind not in described:
            with pytest.raises(sk.ConfigError, match=re.escape(repr(device.device_kind)) + " matches no target"):
                sk.load_policy(environ={})
            return
        policy = sk.load_policy(environ={})
        assert device.device_kind in policy.target.device_kinds
        assert policy.sm_count == device.core_count
        config = SIZES["gqa-llama"]
        plan = policy.plan(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_decode_seqs=64)
        assert plan.num_splits > 1
        paged = config.paged(config.sequences(8))
        assert_close(paged.decode(plan), paged.dense())

    def test_another_sm_count_is_refused_where_it_is_used(self):
        cores = jax.devices()[0].core_count
        name = next(t for t in ("gb10", "a100") if sk.load_target(t).sm_count != cores)
        config = CONFIGS["gqa"]
        num_q_heads, num_kv_heads = config.heads
        shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": config.head_dim}
        shape |= {"page_size": config.page_size, "max_decode_seqs": 8, "q_dtype": config.q_dtype}
        arrays = config.paged(config.sequences(4)).arrays
        with pytest.raises(sk.ConfigError, match=rf"is not this device's: .* has {cores}"):
            sk.paged_decode_attention(*arrays, plan=sk.load_policy(name, environ={}).plan(**shape))
        ahead = sk.load_policy(name, environ={}, ahead_of_time=True).plan(**shape)
        assert np.isfinite(np.asarray(sk.paged_decode_attention(*arrays, plan=ahead))).all()
