"""Public bug reports about policies, settings and packaging, as small cases. The ids are those of README.md."""

import functools
import json
import os
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_same_bits, bits, make_plan, random_paged

import splitk_jax as sk
from splitk_jax.kernels.reference import split as reference_split

COUNTS = ["SPLIT_SIZE", "TARGET_WAVES", "TARGET_CTAS", "MAX_SPLITS", "MIN_KV_PER_SPLIT"]
SHAPE = {
    "num_q_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 80,
    "page_size": 16,
    "max_decode_seqs": 8,
    "q_dtype": "float32",
    "kv_dtype": "float32",
}
BFLOAT16 = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}


@functools.cache
def small_case():
    return random_paged([100, 37], head_dim=80, width=8, num_pages=10)


def origin(policy, key):
    return next(where for name, _, where in policy.settings() if name == key)


def write_target(path, splits, **policy):
    lines = "\n".join(f"{key} = {value}" for key, value in policy.items())
    path.write_text(f'schema = 1\nbase = "cpu"\n[policy]\nsplits = {splits}\nmin_kv_per_split = 16\n{lines}\n')
    return path


# D01: changing the policy after the first call does nothing.


def jitted_decode():
    """A user's own jitted function, and the plans that it was traced with."""
    traced = []

    def call(q, k_pages, v_pages, block_tables, seq_lens, *, plan):
        traced.append(plan.num_splits)
        return sk.paged_decode_attention(q, k_pages, v_pages, block_tables, seq_lens, plan=plan, return_lse=True)

    return jax.jit(call, static_argnames="plan"), traced


def test_d01_a_new_environment_makes_a_new_plan_and_moves_no_old_one(monkeypatch):
    call, traced = jitted_decode()
    case = small_case()
    plans, results = {}, {}
    for splits in (2, 8):
        monkeypatch.setenv("SPLITK_JAX_SPLITS", str(splits))
        plans[splits] = sk.load_policy("cpu", min_kv_per_split=16).plan(**SHAPE)
        results[splits] = call(*case.arrays, plan=plans[splits])
    assert [plan.num_splits for plan in plans.values()] == traced == [2, 8]
    assert "num_splits       8 = clamp(8 pinned" in plans[8].explain()
    assert (bits(results[2][0]) != bits(results[8][0])).any()
    # The old plan is what it was, whatever the environment says now.
    monkeypatch.setenv("SPLITK_JAX_SPLITS", "no such rule")
    assert_same_bits(call(*case.arrays, plan=plans[2]), results[2])
    assert traced == [2, 8]
    for splits, plan in plans.items():
        assert_same_bits(case.decode(plan), results[splits])


def test_d01_tracing_reads_no_environment(monkeypatch):
    call, traced = jitted_decode()
    plan = make_plan(5, head_dim=80)
    monkeypatch.setenv("SPLITK_JAX_SPLITS", "no such rule")
    monkeypatch.setenv("SPLITK_JAX_NO_SUCH_NAME", "1")
    call(*small_case().arrays, plan=plan)
    assert traced == [5]


def test_d01_two_plans_in_one_function():
    """The jaxpr launches what each plan says: the shape of the partials holds its split count."""
    case = small_case()
    plans = [make_plan(splits, head_dim=80) for splits in (11, 13)]
    jaxpr = str(
        jax.make_jaxpr(lambda *arrays: [sk.paged_decode_attention(*arrays, plan=plan) for plan in plans])(*case.arrays)
    )
    for plan in plans:
        assert f"f32[2,{plan.num_splits},1,2,80]" in jaxpr
    assert "f32[2,12,1,2,80]" not in jaxpr


def test_d01_a_target_file_is_read_when_the_policy_is_loaded(tmp_path):
    call, traced = jitted_decode()
    path = write_target(tmp_path / "mine.toml", 2)
    old = sk.load_policy(str(path), environ={}).plan(**SHAPE)
    call(*small_case().arrays, plan=old)
    write_target(path, 8)
    new = sk.load_policy(str(path), environ={}).plan(**SHAPE)
    call(*small_case().arrays, plan=new)
    assert (old.num_splits, new.num_splits) == (2, 8)
    assert traced == [2, 8]
    assert old.fingerprint() != new.fingerprint()


# D03: an environment override parsed loosely.


@pytest.mark.parametrize("variable", COUNTS)
@pytest.mark.parametrize(
    "text", ["", " ", " 8 ", "8 ", "8.0", "0x8", "abc", "-1", "+8", "0", "08", "8_0", "1e2", "true", "True", "\u0668"]
)
def test_d03_counts_are_exact(variable, text):
    name = f"SPLITK_JAX_{variable}"
    with pytest.raises(sk.ConfigError) as error:
        sk.load_policy("cpu", environ={name: text})
    # A 0 was read, as a number; anything else was not.
    got = text if text == "0" else repr(text)
    assert f"environment variable {name}={got} is not valid: accepted is a whole number from 1" in str(error.value)


@pytest.mark.parametrize("variable", COUNTS)
def test_d03_a_count_is_taken_and_shown(variable):
    name = f"SPLITK_JAX_{variable}"
    policy = sk.load_policy("cpu", environ={name: "48"})
    key = variable.lower()
    assert getattr(policy, key) == 48
    assert origin(policy, key) == f"environment variable {name}"


@pytest.mark.parametrize("name", ["SPLITK_JAX_SPLITS", "ATLAS_ATTN_DECODE_SPLITK"])
@pytest.mark.parametrize(
    "text",
    ["", " 8 ", "8.0", "0x8", "abc", "-1", "00", "08", "true", "True", "FALSE", "OFF", "Auto", "on", "yes", "None"],
)
def test_d03_split_rules_are_exact(name, text):
    with pytest.raises(sk.ConfigError) as error:
        sk.load_policy("cpu", environ={name: text})
    assert f"environment variable {name}={text!r} is not valid: accepted is auto, balanced, legacy, adaptive" in str(
        error.value
    )


@pytest.mark.parametrize("name", ["SPLITK_JAX_SPLITS", "ATLAS_ATTN_DECODE_SPLITK"])
@pytest.mark.parametrize(
    ("text", "splits"),
    [
        ("1", 1),
        ("0", 1),
        ("2", 2),
        ("8", 8),
        ("no", 1),
        ("off", 1),
        ("false", 1),
        ("auto", "auto"),
        ("balanced", "balanced"),
        ("legacy", "legacy"),
    ],
)
def test_d03_a_split_rule_is_taken_and_shown(name, text, splits):
    policy = sk.load_policy("cpu", environ={name: text})
    assert policy.splits == splits
    assert origin(policy, "splits") == f"environment variable {name}"


def test_d03_the_alias_is_read_when_ours_is_unset():
    both = {"SPLITK_JAX_SPLITS": "3", "ATLAS_ATTN_DECODE_SPLITK": "5"}
    assert sk.load_policy("cpu", environ=both).splits == 3


@pytest.mark.parametrize("text", ["", "Reference", "cuda", " reference"])
def test_d03_a_backend_is_exact(text):
    with pytest.raises(sk.ConfigError, match=r"environment variable SPLITK_JAX_KERNEL=.* is not valid: accepted is"):
        sk.load_policy("cpu", environ={"SPLITK_JAX_KERNEL": text})


@pytest.mark.parametrize("name", ["SPLITK_JAX_NUM_SPLITS", "SPLITK_JAX_SPLIT", "SPLITK_JAX_", "SPLITK_JAX_splits"])
def test_d03_a_misspelt_variable_is_an_error(name):
    with pytest.raises(
        sk.ConfigError, match=f"environment variable {name} is not known: accepted are SPLITK_JAX_TARGET"
    ):
        sk.load_policy("cpu", environ={name: "8"})


def test_d03_precedence_is_argument_environment_user_file_packaged_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = write_target(Path("mine.toml"), 5)
    environ = {"SPLITK_JAX_SPLITS": "6"}
    cases = [
        (sk.load_policy("cpu", environ={}), 4, "configs/cpu.toml [policy] splits"),
        (sk.load_policy(str(path), environ={}), 5, f"{path} [policy] splits"),
        (sk.load_policy(str(path), environ=environ), 6, "environment variable SPLITK_JAX_SPLITS"),
        (sk.load_policy(str(path), environ=environ, splits=7), 7, "argument splits"),
    ]
    for policy, splits, where in cases:
        assert policy.splits == splits
        assert origin(policy, "splits") == where
        assert where in policy.describe()
    # What the user's file leaves out comes from the packaged one, and says so.
    assert origin(cases[1][0], "max_splits") == f"configs/cpu.toml [policy] max_splits (base of {path})"


@pytest.mark.parametrize("name", ["./missing.toml", "missing.toml", "folder/missing", "no_such_target"])
def test_d03_a_target_that_does_not_exist_is_an_error(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for load in (lambda: sk.load_policy(name, environ={}), lambda: sk.load_policy(environ={"SPLITK_JAX_TARGET": name})):
        with pytest.raises(sk.ConfigError, match=f"target .*'{Path(name)}' (does not exist|is not known)"):
            load()


# D04: splits chosen from the wrong input.


def test_d04_traced_on_a_warm_up_run_on_long_rows():
    case = random_paged([4096], width=256, num_pages=260)
    warm_up = case.replace(seq_lens=np.array([1], np.int32))
    call, traced = jitted_decode()
    plan = case.plan(8)
    call(*warm_up.arrays, plan=plan)
    out, lse = call(*case.arrays, plan=plan)
    assert traced == [8]
    dense_out, dense_lse = case.dense()
    np.testing.assert_allclose(out, dense_out, atol=2e-5)
    np.testing.assert_allclose(lse, dense_lse, atol=2e-5)
    assert_same_bits((out, lse), case.decode(plan))


def splits_of(target="h200", **overrides):
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 128, "page_size": 16, "max_decode_seqs": 1}
    policy = {key: overrides.pop(key) for key in ("splits", "max_splits") if key in overrides}
    return sk.load_policy(target, environ={}, target_waves=2, **policy).plan(**(shape | overrides)).num_splits


@pytest.mark.parametrize(
    "target", ["h200", "h100", "a100", "l40s", "b200", "gb10", "rtx_4090", "rtx_pro_6000", "mi300x"]
)
def test_d04_one_sequence_is_split(target):
    assert splits_of(target) > 8


def test_d04_kv_heads_are_counted_and_not_query_heads():
    # Below the ceiling, or every count would look the same.
    counts = [splits_of(num_q_heads=heads, max_splits=4096) for heads in (1, 8, 64)]
    assert counts == [264, 264, 264]
    assert splits_of(num_q_heads=10, num_kv_heads=10, max_splits=4096) == 52
    assert splits_of(num_q_heads=10, num_kv_heads=10, max_splits=4096, splits="auto") == 53
    assert splits_of(num_q_heads=66, max_splits=4096) == 132


def test_d04_the_head_dim_and_the_capacity_of_the_pool_are_not_read():
    assert len({splits_of(head_dim=n, page_size=page) for n in (64, 128, 256) for page in (16, 64)}) == 1


def test_d04_no_cliff_along_the_batch():
    assert len({splits_of(max_decode_seqs=n) for n in range(1, 130)}) == 1
    plan = sk.load_policy("h200", environ={}).plan(**SHAPE | BFLOAT16)
    assert {row["num_splits"] for row in plan.report()["batches"]} == {plan.num_splits}


def test_d04_active_splits_follow_the_context():
    settings = {"splits": "auto", "target_waves": 2, "max_splits": 64, "min_kv_per_split": 256}
    policy = sk.load_policy("h200", environ={}, **settings)
    plan = policy.plan(**SHAPE | BFLOAT16)
    active = [sum(high > low for low, high in plan.split_bounds(n)) for n in range(0, 131072, 997)]
    for n, count in zip(range(0, 131072, 997), active, strict=True):
        # Never a split for less than min_kv_per_split tokens but the last.
        assert count <= -(-n // plan.min_kv_per_split)
    # 16384 tokens fill 64 splits of 256; from there on, rounding the span to a block may leave the last ones empty.
    assert active[:17] == sorted(active[:17])
    assert active[-1] == plan.num_splits == 64
    reported = [row["active_splits"] for row in plan.report()["contexts"]]
    assert reported == [1, 4, 16, 64, 64, 64]


def test_d04_a_count_that_is_clamped_says_so():
    plan = sk.load_policy("h200", environ={}, splits=200).plan(**SHAPE | BFLOAT16)
    assert plan.num_splits == 132
    assert "num_splits       132 = clamp(200 pinned, 1, max_splits 132)" in plan.explain()


# D06: recompilation on decode steps.


@pytest.fixture
def kernel_traces(monkeypatch):
    """Counts how often the op itself is traced."""
    traces = []

    def counted(*args, **kwargs):
        traces.append(kwargs["plan"].num_splits)
        return split(*args, **kwargs)

    split = reference_split.split
    monkeypatch.setattr(reference_split, "split", counted)
    return traces


def test_d06_two_hundred_steps_trace_once(tmp_path, kernel_traces):
    """Growing lengths, a row that leaves and comes back, and a policy that is loaded anew in each step."""
    path = write_target(tmp_path / "mine.toml", 3)
    traces = 0

    def step(pages, token, block_tables, positions, *, plan):
        nonlocal traces
        traces += 1
        k = jnp.broadcast_to(token[:, None, None], (4, 1, 80))
        pages = pages.append(k, k, block_tables, positions)
        seq_lens = jnp.maximum(positions, -1) + 1
        q = jnp.zeros((4, 2, 80))
        return pages, sk.paged_decode_attention(q, pages.k_pages, pages.v_pages, block_tables, seq_lens, plan=plan)

    jitted = jax.jit(step, static_argnames="plan", donate_argnums=0)
    pages = sk.KVPages.init(num_pages=56, page_size=16, num_kv_heads=1, head_dim=80, dtype="float32")
    tables = np.random.default_rng(0).permutation(56).astype(np.int32).reshape(4, 14)
    positions = np.array([0, 5, 1, 0], np.int32)
    for i in range(200):
        plan = sk.load_policy(str(path), environ={}).plan(**SHAPE)
        live = np.array([True, True, not 60 <= i < 120, True])
        if i == 120:
            positions[2] = 0
        at = np.where(live, positions, -1).astype(np.int32)
        # As numpy and as jax arrays.
        arrays = (np.full(4, i, np.float32), tables, at)
        pages, out = jitted(pages, *(map(jnp.asarray, arrays) if i % 2 else arrays), plan=plan)
        positions[live] += 1
    assert traces == 1
    assert kernel_traces == [3]
    # Row 0 holds 0 to 199, row 2 (back since step 120) 120 to 199; row 1 began with 5 slots of zeros.
    np.testing.assert_allclose(out[:, 0, 0], [99.5, sum(range(200)) / 205, 159.5, 99.5], rtol=1e-5)


def test_d06_equal_plans_of_the_op_itself_trace_once(kernel_traces):
    case = random_paged([20, 3, 50], width=5, num_pages=9)  # shapes of this test alone
    for i in range(5):
        seq_lens = case.seq_lens + i
        arrays = (*case.arrays[:4], jnp.asarray(seq_lens) if i % 2 else seq_lens)
        sk.paged_decode_attention(*arrays, plan=case.plan(3))
    assert kernel_traces == [3]
    sk.paged_decode_attention(*case.arrays, plan=case.plan(2))
    assert kernel_traces == [3, 2]


RULES = ["auto", "balanced", "legacy", "adaptive", "fixed_size", "off", 3]


@pytest.mark.parametrize("rule", RULES)
def test_d06_policies_and_plans_are_hashable_with_every_key(rule, tmp_path):
    path = tmp_path / "full.toml"
    path.write_text(
        f"""
        schema = 1
        [hardware]
        name = "A part"
        device_kinds = ["A part", "The same part"]
        arch = "sm_90"
        sm_count = 132
        hbm_gb_per_s = 4800.5
        l2_mib = 50.5
        smem_per_cta_kib = 227
        [policy]
        splits = {json.dumps(rule)}
        split_size = 512
        target_waves = 3
        target_ctas = 200
        max_splits = 32
        min_kv_per_split = 128
        [kernel]
        backend = "reference"
        [[kernel.tile]]
        head_dim = 128
        kv_dtype = "float32"
        heads_per_cta = 64
        block_kv = 64
        step_kv = 128
        [[kernel.tile]]
        heads_per_cta = 16
        block_kv = 64
        step_kv = 64
        """
    )
    policies = [sk.load_policy(str(path), environ={}) for _ in range(2)]
    plans = [policy.plan(**SHAPE, num_seqs=4, max_seq_len=4096) for policy in policies]
    for one, other in (policies, plans):
        assert one == other
        assert hash(one) == hash(other)
    assert plans[0].fingerprint() == plans[1].fingerprint()


def test_d06_origins_do_not_retrace(tmp_path):
    by_file = sk.load_policy(str(write_target(tmp_path / "mine.toml", 3)), environ={})
    by_argument = sk.load_policy("cpu", environ={}, splits=3, min_kv_per_split=16)
    assert origin(by_file, "splits") != origin(by_argument, "splits")
    assert by_file == by_argument
    assert by_file.plan(**SHAPE) == by_argument.plan(**SHAPE)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seq_lens", 5),
        ("seq_lens", [100, 37]),
        ("seq_lens", np.array([100, 37])),
        ("seq_lens", np.array([100, 37], np.uint32)),
        ("block_tables", np.zeros((2, 8), np.int64)),
        ("block_tables", np.zeros((2, 8), np.float32)),
        ("block_tables", [[0] * 8] * 2),
    ],
    ids=["int", "list", "int64-lengths", "uint32-lengths", "int64-table", "float-table", "list-table"],
)
def test_d06_other_kinds_of_lengths_and_tables_are_refused(argument, value):
    case = small_case()
    with pytest.raises(TypeError, match=argument):
        case.replace(**{argument: value}).decode(make_plan(3, head_dim=80))


# D07: a tuned entry that does not fit.


def test_d07_partials_of_gigabytes_are_reported():
    shape = {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 512, "page_size": 64, "max_decode_seqs": 64}
    policy = functools.partial(sk.load_policy, "h200", environ={}, backend="reference", splits=128)
    plan = policy(max_splits=128).plan(**shape)
    assert plan.workspace_bytes == 64 * 128 * 128 * (512 + 2) * 4 > 2 * 2**30
    assert "workspace        2.156 GB of float32 partials" in plan.explain()
    assert plan.report()["workspace_bytes"] == plan.workspace_bytes
    capped = policy(max_splits=64).plan(**shape)
    assert capped.num_splits == 64
    assert capped.workspace_bytes * 2 == plan.workspace_bytes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("block_kv = 0", "block_kv=0 is not valid"),
        ("block_kv = 8192", "block_kv=8192 is not valid"),
        ("block_kv = 48", "step_kv=256: accepted is a multiple of block_kv=48"),
        ("heads_per_cta = 0", "heads_per_cta=0 is not valid"),
        ("stages = 0", "stages=0 is not valid"),
        ("warps = 9", "warps=9 is not known"),
    ],
)
def test_d07_a_tile_that_cannot_be_is_refused_with_its_file_and_row(row, message, tmp_path):
    tile = {"heads_per_cta": 16, "block_kv": 64, "step_kv": 256}
    key, _, value = row.partition(" = ")
    lines = "\n".join(f"{k} = {v}" for k, v in (tile | {key: value}).items())
    path = tmp_path / "mine.toml"
    path.write_text(f'schema = 1\nbase = "cpu"\n[[kernel.tile]]\n{lines}\n')
    with pytest.raises(sk.ConfigError) as error:
        sk.load_policy(str(path), environ={})
    assert f"{path}: [[kernel.tile]] row 1" in str(error.value)
    assert message in str(error.value)


def test_d07_a_shape_without_a_tile_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    tile = "head_dim = 128\nheads_per_cta = 16\nblock_kv = 64\nstep_kv = 256"
    path.write_text(f'schema = 1\nbase = "cpu"\n[[kernel.tile]]\n{tile}\n')
    policy = sk.load_policy(str(path), environ={})
    assert policy.plan(**SHAPE | {"head_dim": 128}).block_kv == 64
    with pytest.raises(
        NotImplementedError,
        match=r"head_dim=80, kv_dtype=float32, page_size=16 meet the conditions of no .* row of .*mine",
    ):
        policy.plan(**SHAPE)


# D08: import or policy lookup starts the backend.


def run_python(code, *arguments, path=None):
    """Runs code in a fresh interpreter without our variables, on the package in `path` or else the one under test."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SPLITK_JAX_", "XLA_FLAGS"))}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(path or Path(sk.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code, *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


D08 = """
import os, sys
from click.testing import CliRunner
import splitk_jax as sk
from splitk_jax.cli import main

path = sys.argv[1]
for target in (path, "h200", "cpu"):
    plan = sk.load_policy(target).plan(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, max_decode_seqs=4)
    plan.explain(), plan.fingerprint(), plan.report()
shape = ["--q-heads=8", "--kv-heads=2", "--head-dim=64", "--page-size=16", "--max-decode-seqs=4"]
for arguments in (["--help"], ["targets"], ["show", path], ["explain", "--target", path, *shape]):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output

import jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
assert len(jax.devices()) == 3
print("done")
"""


def test_d08_import_policy_and_command_line_start_no_backend(tmp_path):
    assert run_python(D08, write_target(tmp_path / "mine.toml", 3)) == "done\n"


# D10: policy files missing from the installed package.

TARGETS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.toml"))


def test_d10_every_target_of_the_checkout_is_packaged():
    packaged = resources.files("splitk_jax") / "configs"
    assert sorted(entry.name for entry in packaged.iterdir() if entry.name.endswith(".toml")) == [
        f"{name}.toml" for name in TARGETS
    ]
    assert len(TARGETS) >= 11


@pytest.mark.parametrize("name", TARGETS)
def test_d10_every_target_loads(name):
    checkout = Path(__file__).parents[2] / "configs" / f"{name}.toml"
    assert (resources.files("splitk_jax") / "configs" / f"{name}.toml").read_bytes() == checkout.read_bytes()
    target = sk.load_target(name)
    assert (target.name, target.packaged, target.source) == (name, True, f"configs/{name}.toml")
    policy = sk.load_policy(name, environ={})
    assert policy.target == target
    assert policy.plan(**SHAPE | BFLOAT16, max_seq_len=4096).num_splits >= 1


D10 = """
import sys
import splitk_jax as sk
from splitk_jax.target import load_targets
assert sys.argv[1] in sk.__file__, sk.__file__
for target in load_targets():
    assert target.packaged and target.source == f"configs/{target.name}.toml"
    print(target.name, sk.load_policy(target.name).splits)
"""


def test_d10_targets_load_from_a_zip(tmp_path):
    """Package resources and not `__file__`: what is read need not be a file on disk."""
    package = Path(sk.__file__).parent
    archive = tmp_path / "splitk_jax.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for folder, _, names in os.walk(package, followlinks=True):
            for name in names:
                if name.endswith((".py", ".toml")):
                    path = Path(folder) / name
                    out.write(path, Path("splitk_jax") / path.relative_to(package))
    lines = run_python(D10, archive.name, path=archive).split("\n")[:-1]
    assert lines == [f"{name} {sk.load_policy(name, environ={}).splits}" for name in TARGETS]
