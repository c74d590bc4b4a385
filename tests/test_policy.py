"""The split rules: golden numbers, and the rules checked over whole ranges, not samples."""

import dataclasses

import numpy as np
import pytest

import splitk_jax as sk
from splitk_jax.policy import balanced_splits, check_sm_count

SHAPE = {"ctas": 8, "num_q_heads": 32, "num_seqs": 1, "max_decode_seqs": 64}
BATCHES = (*range(1, 17), 24, 32, 48, 64, 128, 256)


def policy(**fields):
    return sk.Policy(**({"sm_count": 132} | fields))


class TestGoldenNumbers:
    @pytest.mark.parametrize(
        ("sm_count", "ctas", "expected"), [(132, 24, 11), (48, 24, 4), (132, 8, 33), (304, 8, 64), (132, 500, 1)]
    )
    def test_auto(self, sm_count, ctas, expected):
        assert sk.auto_splits(sm_count, ctas) == expected
        assert sk.num_splits(policy(sm_count=sm_count), **SHAPE | {"ctas": ctas}) == expected

    def test_auto_before_the_cap(self):
        assert sk.auto_splits(188, 2, target_waves=2, max_splits=1 << 20) == 188
        assert sk.auto_splits(188, 2, target_waves=2, max_splits=64) == 64

    @pytest.mark.parametrize(
        ("sm_count", "ctas", "expected"),
        [(132, 8, 32), (132, 24, 10), (48, 24, 4), (304, 8, 64), (132, 132, 2), (132, 133, 2), (132, 500, 2)],
    )
    def test_balanced(self, sm_count, ctas, expected):
        assert balanced_splits(sm_count, ctas) == expected
        assert sk.num_splits(policy(sm_count=sm_count, splits="balanced"), **SHAPE | {"ctas": ctas}) == expected

    def test_balanced_at_the_cap_and_at_other_waves(self):
        assert balanced_splits(132, 1, max_splits=1 << 20) == 264
        assert balanced_splits(132, 500, target_waves=3, max_splits=2) == 2
        balanced = policy(splits="balanced", target_waves=3, max_splits=40)
        assert [sk.num_splits(balanced, **SHAPE | {"ctas": n}) for n in (8, 11, 500)] == [40, 36, 3]

    @pytest.mark.parametrize(
        ("sm_count", "heads", "rows", "num_seqs", "expected"),
        [(48, 24, 16, 1, 1), (48, 24, 16, 16, 1), (48, 24, 1, 1, 2), (48, 24, 1, 2, 1), (132, 24, 1, 1, 5)],
    )
    def test_legacy(self, sm_count, heads, rows, num_seqs, expected):
        assert sk.legacy_splits(sm_count, heads, sk.split_ref_seqs(num_seqs, rows)) == expected
        legacy = policy(splits="legacy", sm_count=sm_count)
        shape = {"ctas": 1, "num_q_heads": heads, "num_seqs": num_seqs, "max_decode_seqs": rows}
        assert sk.num_splits(legacy, **shape) == expected

    def test_legacy_is_one_split_at_every_batch_of_the_wrong_part(self):
        """Seed 000: 48 SMs declared, 24 heads, 16 rows: one split always, batch 1 included."""
        legacy = policy(splits="legacy", sm_count=48)
        for num_seqs in range(1, 257):
            shape = {"ctas": 24, "num_q_heads": 24, "num_seqs": num_seqs, "max_decode_seqs": 16}
            assert sk.num_splits(legacy, **shape) == 1

    @pytest.mark.parametrize(("batch", "expected", "launched"), [(1, 8, 16), (16, 6, 192), (64, 2, 256)])
    def test_adaptive(self, batch, expected, launched):
        adaptive = policy(splits="adaptive", sm_count=188, target_ctas=188, max_splits=8, min_kv_per_split=64)
        shape = {"ctas": 2, "num_q_heads": 64, "num_seqs": batch, "max_decode_seqs": 64, "max_seq_len": 512}
        assert sk.num_splits(adaptive, **shape) == expected
        assert batch * 2 * expected == launched

    @pytest.mark.parametrize(("max_seq_len", "expected"), [(1, 1), (512, 1), (513, 2), (131072, 256)])
    def test_fixed_size_counts_whole_splits_whatever_the_cap(self, max_seq_len, expected):
        fixed = policy(splits="fixed_size", split_size=512, max_splits=4)
        assert sk.num_splits(fixed, **SHAPE, max_seq_len=max_seq_len) == expected

    @pytest.mark.parametrize(("splits", "expected"), [(1, 1), (11, 11), (64, 64), (65, 64), ("off", 1), (0, 1)])
    def test_pinned_is_clamped_to_the_cap(self, splits, expected):
        assert sk.num_splits(policy(splits=splits), **SHAPE) == expected

    @pytest.mark.parametrize(("splits", "slots"), [(1, 0), (2, 2 * 24 * 16), (11, 11 * 24 * 16)])
    def test_workspace_slots(self, splits, slots):
        assert sk.workspace_slots(splits, 24, 16) == slots


class TestParseSplits:
    @pytest.mark.parametrize("text", ["auto", "balanced", "legacy", "adaptive", "fixed_size"])
    def test_rules_are_themselves(self, text):
        assert sk.parse_splits(text) == text

    @pytest.mark.parametrize("text", ["off", "0", "false", "no"])
    def test_words_for_off_pin_one_split(self, text):
        assert sk.parse_splits(text) == 1

    @pytest.mark.parametrize(("text", "count"), [("1", 1), ("11", 11), ("2147483647", 2147483647)])
    def test_counts(self, text, count):
        assert sk.parse_splits(text) == count

    @pytest.mark.parametrize(
        "text",
        ["", " 8", "8 ", "8.0", "0x8", "1e2", "-1", "+8", "08", "True", "AUTO", "off ", "2147483648", "nonsense"],
    )
    def test_anything_else_is_refused_with_what_is_accepted(self, text):
        with pytest.raises(sk.ConfigError, match=r"splits=.*is not valid: accepted is auto, balanced, legacy"):
            sk.parse_splits(text)


class TestExhaustively:
    def test_the_rules_of_a_part_over_every_part_and_model(self):
        """743,424 points: the exact values, their range, and the direction in which each input moves them."""
        heads = np.arange(1, 129)
        ctas = heads[:, None] * np.array(BATCHES)
        previous = None
        for sm_count in range(1, 265):
            auto = np.array([sk.auto_splits(sm_count, h) for h in range(1, 129)])
            balanced = np.array([balanced_splits(sm_count, h) for h in range(1, 129)])
            legacy = np.array([[sk.legacy_splits(sm_count, h, b) for b in BATCHES] for h in range(1, 129)])
            assert (auto == np.clip(np.ceil(2 * sm_count / heads), 1, 64)).all()
            # As seed 000 words it: one split once the unsplit grid fills the part.
            assert (legacy == np.where(ctas >= sm_count, 1, sm_count // ctas)).all()
            assert (balanced == np.clip(2 * np.maximum(np.floor(sm_count / heads), 1), 1, 64)).all()
            assert (np.diff(auto) <= 0).all(), "more CTAs a sequence never ask for more splits"
            assert (np.diff(balanced) <= 0).all()
            assert (np.diff(legacy, axis=0) <= 0).all()
            assert (np.diff(legacy, axis=1) <= 0).all()
            if previous is not None:
                assert (auto >= previous[0]).all(), "a larger part never asks for fewer splits"
                assert (balanced >= previous[1]).all()
                assert (legacy >= previous[2]).all()
            previous = auto, balanced, legacy

    def test_auto_and_pinned_read_nothing_of_the_batch(self):
        for splits in ("auto", "balanced", 7):
            counts = {
                sk.num_splits(policy(splits=splits), ctas=8, num_q_heads=32, num_seqs=b, max_decode_seqs=m)
                for b in BATCHES
                for m in BATCHES
            }
            assert len(counts) == 1

    def test_adaptive_stays_in_range_and_falls_with_the_batch(self):
        for target_ctas in (1, 48, 132, 188, 376):
            for ctas in (1, 2, 8, 32):
                for kv in (1, 63, 64, 512, 4096, 131072):
                    adaptive = policy(splits="adaptive", target_ctas=target_ctas, max_splits=8, min_kv_per_split=64)
                    shape = {"ctas": ctas, "num_q_heads": 32, "max_decode_seqs": 256, "max_seq_len": kv}
                    counts = [sk.num_splits(adaptive, num_seqs=b, **shape) for b in BATCHES]
                    assert min(counts) >= 1
                    assert max(counts) <= min(8, max(kv // 64, 1))
                    assert counts == sorted(counts, reverse=True)

    @pytest.mark.parametrize("cast", [np.int32, np.int64, np.uint8])
    def test_numpy_integers_are_integers(self, cast):
        got = sk.auto_splits(cast(132), cast(24), target_waves=cast(2), max_splits=cast(64))
        assert got == 11
        assert type(got) is int


class TestBadNumbers:
    @pytest.mark.parametrize("value", [True, 1.0, np.float32(8), "8", None, [1], np.array([1])])
    def test_not_a_whole_number(self, value):
        with pytest.raises(TypeError, match=r"ctas=.*must be a static whole number"):
            sk.auto_splits(132, value)

    @pytest.mark.parametrize("value", [0, -1, 1 << 40])
    def test_out_of_range(self, value):
        with pytest.raises(ValueError, match=r"num_q_heads=.*accepted is a whole number from 1 to 2147483647"):
            sk.legacy_splits(132, value, 1)

    @pytest.mark.parametrize("rule", ["adaptive", "fixed_size"])
    def test_a_rule_that_needs_the_length_says_so(self, rule):
        with pytest.raises(ValueError, match=f"max_seq_len=None: the {rule} rule needs"):
            sk.num_splits(policy(splits=rule), **SHAPE)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("splits", "sometimes"),
            ("splits", True),
            ("splits", -1),
            ("target_waves", 0),
            ("max_splits", 1.5),
            ("min_kv_per_split", "256"),
            ("backend", "cuda"),
            ("sm_count", 0),
        ],
    )
    def test_policy_fields(self, field, value):
        with pytest.raises((ValueError, TypeError), match=f"{field}="):
            policy(**{field: value})

    @pytest.mark.parametrize("field", ["min_kv_per_split", "split_size"])
    def test_edges_lie_on_blocks(self, field):
        with pytest.raises(sk.ConfigError, match=rf"{field}=100 .*multiple of the tile's block_kv=64"):
            policy(splits="fixed_size", **{field: 100})

    def test_tiles(self):
        with pytest.raises(TypeError, match="tiles="):
            policy(tiles=())
        with pytest.raises(sk.ConfigError, match="step_kv=100: accepted is a multiple of block_kv=64"):
            sk.Tile(heads_per_cta=16, block_kv=64, step_kv=100)


class TestPolicyIsAValue:
    def test_equal_whatever_its_origin(self):
        a = sk.load_policy("h100", environ={})
        b = sk.load_policy("h200", environ={})
        assert a.origins != b.origins
        assert a == b
        assert hash(a) == hash(b)

    def test_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy().splits = 3

    def test_target_ctas_defaults_to_the_sm_count(self):
        assert policy().target_ctas == 132
        assert policy(target_ctas=7).target_ctas == 7

    def test_first_tile_whose_conditions_hold(self):
        rows = (
            sk.Tile(head_dim=128, kv_dtype="bfloat16", heads_per_cta=1, block_kv=16, step_kv=16),
            sk.Tile(head_dim=128, page_size=64, heads_per_cta=2, block_kv=16, step_kv=16),
            sk.Tile(head_dim=128, heads_per_cta=3, block_kv=16, step_kv=16),
        )
        assert policy(tiles=rows).tile(128, "bfloat16", 64).heads_per_cta == 1
        assert policy(tiles=rows).tile(128, "float32", 64).heads_per_cta == 2
        assert policy(tiles=rows).tile(128, "float32", 16).heads_per_cta == 3
        with pytest.raises(NotImplementedError, match="head_dim=64, kv_dtype=float32, page_size=16 meet"):
            policy(tiles=rows).tile(64, "float32", 16)

    def test_describe_prints_every_setting_with_its_origin(self):
        text = sk.load_policy("h200", environ={"SPLITK_JAX_SPLITS": "11"}, max_splits=8).describe()
        for line in (
            "splits             11       environment variable SPLITK_JAX_SPLITS",
            "max_splits         8        argument max_splits",
            "split_size         512      configs/h200.toml [policy] split_size",
            "target_ctas        132      default: sm_count",
        ):
            assert line in text


class Device:
    def __init__(self, kind, cores, platform="gpu"):
        self.device_kind, self.core_count, self.platform = kind, cores, platform


class TestDevice:
    def test_a_slice_of_the_part_is_refused_with_both_counts(self):
        with pytest.raises(
            sk.ConfigError, match=r"sm_count=132 of configs/h200.toml.*NVIDIA H200 has 60.*ahead_of_time"
        ):
            check_sm_count(132, "configs/h200.toml", Device("NVIDIA H200", 60))

    @pytest.mark.parametrize("device", [Device("NVIDIA H200", 132), Device("cpu", 1, "cpu"), Device("x", None)])
    def test_equal_or_uncounted_passes(self, device):
        check_sm_count(132, "configs/h200.toml", device)

    def test_looked_up_by_device_kind(self, monkeypatch):
        import jax

        monkeypatch.setattr(jax, "devices", lambda: [Device("NVIDIA H100 PCIe", 114)])
        assert sk.load_policy().target.name == "h100_pcie"
        monkeypatch.setattr(jax, "devices", lambda: [Device("NVIDIA H200", 60)])
        with pytest.raises(sk.ConfigError, match="sm_count=132"):
            sk.load_policy()
        assert sk.load_policy(ahead_of_time=True).sm_count == 132
        monkeypatch.setattr(jax, "devices", lambda: [Device("NVIDIA H200 MIG 3g.71gb", 60)])
        with pytest.raises(sk.ConfigError, match=r"'NVIDIA H200 MIG 3g.71gb' matches no target.*SPLITK_JAX_TARGET"):
            sk.load_policy()

    def test_a_plan_for_a_gpu_is_compared_when_it_is_used(self, monkeypatch):
        import jax
        import jax.numpy as jnp

        shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 4, "page_size": 2, "max_decode_seqs": 1}
        arrays = (jnp.zeros((1, 2, 4), "bfloat16"), *[jnp.zeros((1, 2, 1, 4), "bfloat16")] * 2)
        arrays += (jnp.zeros((1, 1), "int32"), jnp.ones((1,), "int32"))
        plan = sk.load_policy("h200", environ={}, backend="reference").plan(**shape)
        sk.paged_decode_attention(*arrays, plan=plan)
        devices = jax.devices()
        monkeypatch.setattr(jax, "devices", lambda *a: devices if a else [Device("NVIDIA H200 MIG", 60)])
        with pytest.raises(sk.ConfigError, match=r"sm_count=132.*has 60"):
            sk.paged_decode_attention(*arrays, plan=plan)
        ahead = sk.load_policy("h200", environ={}, backend="reference", ahead_of_time=True).plan(**shape)
        sk.paged_decode_attention(*arrays, plan=ahead)
