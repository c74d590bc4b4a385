"""The merge of partials: folded one by one or weighed all at once, it comes to the same bits."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from splitk_jax.kernels.mosaic.fold import LEAST, finish, fold, to_whole, weights
from splitk_jax.kernels.partials import SplitPartials
from splitk_jax.plan import RUN_SPLITS

HEADS, HEAD_DIM = 600, 8
EMPTY = SplitPartials(*map(np.float32, (np.zeros((HEADS, HEAD_DIM)), np.full(HEADS, -np.inf), np.zeros(HEADS))))


@pytest.fixture(autouse=True)
def _exact_exp2(monkeypatch):
    """As in a kernel: XLA computes `exp` of a product, which is not exact for a whole number."""
    monkeypatch.setattr(jnp, "exp2", lambda x: jnp.asarray(np.exp2(np.asarray(x, np.float64)), jnp.float32))


def across(x):
    return x[..., None]


def bits(x):
    return np.asarray(x).view(np.int32)


def runs_of(parts):
    splits = [SplitPartials(*part) for part in zip(*map(jnp.asarray, parts), strict=True)]
    return [splits[i : i + RUN_SPLITS] for i in range(0, len(splits), RUN_SPLITS)]


def one_by_one(parts):
    """As the split kernel, which learns of a larger `m` on the way."""
    folded = functools.partial(functools.reduce, lambda acc, part: fold(acc, part, across))
    return finish(folded([folded(run, EMPTY) for run in runs_of(parts)], EMPTY), across)


def all_at_once(parts):
    """As the combine, which knows the largest `m` first: what is left is one sum."""
    m_all = jnp.max(jnp.asarray(parts.m), axis=0)

    def term(part):
        near, far = weights(part.m, m_all)
        return part.o * across(near) * across(far), part.l * near * far

    summed = functools.partial(functools.reduce, lambda a, b: (a[0] + b[0], a[1] + b[1]))
    o, total = summed([summed(map(term, run)) for run in runs_of(parts)])
    return finish(SplitPartials(o, m_all, total), across)


def random_partials(splits):
    """Of each head, logits close together or further apart than two weights reach; outputs of like or of any size."""
    rng = np.random.default_rng(splits)
    spread, size = rng.choice([0, 3, 30, 100, 200, 600], HEADS), rng.choice([1, 30], (HEADS, 1))
    m = rng.integers(-2000, 2000, HEADS) + rng.integers(-spread, spread + 1, (splits, HEADS))
    o = 10 ** rng.uniform(-size, size, (splits, HEADS, HEAD_DIM))
    o *= rng.choice([-1, 0, 1], o.shape, p=[0.45, 0.1, 0.45])
    full = rng.random(m.shape) < 0.8
    parts = o * across(full), np.where(full, m, -np.inf), full * 10 ** rng.uniform(np.log10(0.7), 4, m.shape)
    return SplitPartials(*(x.astype(np.float32) for x in parts))


def test_to_whole():
    rng = np.random.default_rng(0)
    m = rng.uniform(-1, 1, 4000) * 2.0 ** rng.integers(-30, 23, 4000)
    m = np.float32([*m, *np.arange(-40, 40) / 4, np.inf, -np.inf, np.nan])
    assert_array_equal(to_whole(jnp.asarray(m)), np.rint(m))
    m = 2.0 ** rng.uniform(22, 127.9, 8000) * rng.choice([-1, 1], 8000)
    m = np.float32([*m, *-(2.0**22 + np.arange(1, 4000) / 2)])
    whole = np.asarray(to_whole(jnp.asarray(m)), np.float64)
    assert_array_equal(whole, np.rint(whole))
    assert (np.abs(whole - m) <= np.maximum(1, np.abs(m) * 2.0**-23)).all()


@pytest.mark.parametrize("m_new", [0, 37, -1000, 2**22])
def test_weights(m_new):
    d = np.arange(0, -400, -1)
    m_new = jnp.full(d.shape, m_new, jnp.float32)
    near, far = (np.asarray(x, np.float64) for x in weights(m_new + d.astype(np.float32), m_new))
    assert_array_equal(near * far, 2.0 ** np.maximum(d, -252))
    assert_array_equal(np.frexp([near, far])[0], 0.5)
    empty = jnp.full_like(m_new, -jnp.inf)
    assert np.isfinite([*weights(empty, m_new), *weights(empty, empty)]).all()


@pytest.mark.parametrize("splits", [1, 2, RUN_SPLITS, RUN_SPLITS + 1, 40])
def test_same_bits(splits):
    parts = random_partials(splits)
    merged = out, lse = one_by_one(parts)
    for x, y in zip(merged, all_at_once(parts), strict=True):
        assert_array_equal(bits(x), bits(y))
    if splits > 2:  # such bits tell one order from another
        assert (bits(out) != bits(one_by_one(SplitPartials(*(x[::-1] for x in parts)))[0])).any()

    o, m, sums = (x.astype(np.float64) for x in parts)
    m_all = np.maximum(m.max(0), -1e4)
    weight = 2.0 ** (m - m_all)
    total = (sums * weight).sum(0)
    with np.errstate(divide="ignore"):
        assert_allclose(lse, np.log(total) + m_all * np.log(2), rtol=1e-6, atol=1e-6)
    terms = o * across(weight / np.where(total == 0, 1, total))
    assert (np.abs(out - terms.sum(0)) <= 1e-5 * np.abs(terms).sum(0) + LEAST / 0.7).all()


@pytest.mark.parametrize("poisoned", ["m", "oml"])
def test_nan_stays_in_its_head(poisoned):
    parts = random_partials(20)
    good = one_by_one(parts)
    bad = np.arange(HEADS) % 3 == 0
    at = np.random.default_rng(0).integers(0, 20, HEADS)[bad]
    for name in poisoned:
        getattr(parts, name)[at, bad] = np.nan
    for merged in (one_by_one(parts), all_at_once(parts)):
        for x, y in zip(merged, good, strict=True):
            assert np.isnan(x[bad]).all()
            assert_array_equal(bits(x)[~bad], bits(y)[~bad])


def test_finish():
    below = np.nextafter(np.float32(LEAST), np.float32(0))
    o = jnp.asarray([[LEAST, -LEAST, below, -below, -0.0, 6.0], [0] * 6], jnp.float32)
    out, lse = finish(SplitPartials(o, jnp.asarray([3.0, -jnp.inf]), jnp.asarray([2.0, 0.0])), across)
    assert_array_equal(bits(out), bits(np.float32([[LEAST / 2, -LEAST / 2, 0, 0, 0, 3], [0] * 6])))
    assert_allclose(lse, [4 * np.log(2), -np.inf], rtol=1e-6)
