"""The command line as a person and a program use it."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from splitk_jax.cli import main

SHAPE = {"--q-heads": 32, "--kv-heads": 8, "--head-dim": 128, "--page-size": 16, "--max-decode-seqs": 64}
EXPLAIN = ["explain", "--target", "h200", *(str(x) for item in SHAPE.items() for x in item)]


def run(*args, env=None):
    return CliRunner().invoke(main, list(args), env=env)


def test_targets_lists_every_one():
    done = run("targets")
    assert done.exit_code == 0
    for name in ("gb10", "rtx_pro_6000", "h100_pcie", "mi300x", "cpu"):
        assert f" {name} " in done.output
    facts = json.loads(run("targets", "--json").output)
    assert {t["target"]: t["hardware"]["sm_count"] for t in facts}["b200"] == 148


def test_targets_lists_the_users_too(tmp_path):
    (tmp_path / "mine.toml").write_text("schema = 1\nbase = 'h200'\n[policy]\nsplits = 11\n")
    facts = json.loads(run("targets", "--json", env={"SPLITK_JAX_CONFIG_DIR": str(tmp_path)}).output)
    mine = next(t for t in facts if t["target"] == "mine")
    assert (mine["declared"]["splits"], mine["packaged"]) == (11, False)


def test_targets_lists_the_good_ones_beside_a_broken_one(tmp_path):
    (tmp_path / "broken.toml").write_text("schema = 1\nbase = 'h200'\n[policy]\nsplit = 11\n")
    done = run("targets", env={"SPLITK_JAX_CONFIG_DIR": str(tmp_path)})
    assert " h200 " in done.stdout
    assert done.exit_code == 2
    assert f"{tmp_path}/broken.toml: [policy] split=11 is not known" in done.stderr


def test_show_takes_the_target_of_the_environment():
    assert "NVIDIA GB10" in run("show", env={"SPLITK_JAX_TARGET": "gb10"}).output


def test_show_prints_hardware_tiles_and_origins():
    done = run("show", "h200", env={"SPLITK_JAX_MAX_SPLITS": "8"})
    assert done.exit_code == 0
    for line in (
        "hbm_gb_per_s       4800",
        "configs/h200.toml [hardware] hbm_gb_per_s",
        "max_splits         8          environment variable SPLITK_JAX_MAX_SPLITS",
        "heads_per_cta",
        "page_size",
        "stages",
    ):
        assert line in done.output
    facts = json.loads(run("show", "cpu", "--json").output)
    assert facts["hardware"]["hbm_gb_per_s"] is None
    assert {"key": "splits", "value": 4, "origin": "configs/cpu.toml [policy] splits"} in facts["settings"]


def test_explain():
    args = [*EXPLAIN, "--target-waves", "2"]
    done = run(*args)
    assert done.exit_code == 0
    assert "num_splits       66 = clamp(2 waves * max(132 SMs // 4 CTAs, 1), 1, max_splits 132)" in done.output
    assert json.loads(run(*args, "--json").output)["plan"]["num_splits"] == 66


def test_explain_of_a_call():
    done = run(*EXPLAIN, "--q-len", "4", "--window", "1024")
    assert "call             4 query tokens a sequence, 16 of their heads a warpgroup, a window of 1024" in done.output
    shape = [x for x in EXPLAIN if x not in ("--target", "h200")]
    facts = json.loads(run(*shape, "--q-len", "4", "--compare", "h200,b200", "--json").output)
    assert [report["q_len"] for report in facts.values()] == [4, 4]


@pytest.mark.parametrize(("text", "count"), [("11", 11), ("off", 1)])
def test_explain_under_the_environment(text, count):
    done = run(*EXPLAIN, env={"SPLITK_JAX_SPLITS": text})
    assert f"num_splits       {count} = clamp({count} pinned, 1, max_splits 132)" in done.output
    assert "environment variable SPLITK_JAX_SPLITS" in done.output


@pytest.mark.parametrize(
    ("flag", "text", "key", "value"),
    [
        ("--splits", "legacy", "splits", "legacy"),
        ("--split-size", "128", "split_size", 128),
        ("--target-waves", "1", "target_waves", 1),
        ("--target-ctas", "264", "target_ctas", 264),
        ("--max-splits", "8", "max_splits", 8),
        ("--min-kv-per-split", "512", "min_kv_per_split", 512),
        ("--kernel", "reference", "backend", "reference"),
    ],
)
def test_flags_go_before_the_environment(flag, text, key, value):
    done = run(*EXPLAIN, flag, text, "--json", env={"SPLITK_JAX_SPLITS": "3"})
    settings = {s["key"]: (s["value"], s["origin"]) for s in json.loads(done.output)["settings"]}
    assert settings[key] == (value, f"argument {key}")


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (EXPLAIN, {"SPLITK_JAX_SPLITS": "nonsense"}, "environment variable SPLITK_JAX_SPLITS='nonsense' is not valid"),
        (EXPLAIN, {"SPLITK_JAX_SPLIT": "8"}, "environment variable SPLITK_JAX_SPLIT is not known"),
        ([*EXPLAIN, "--splits", " 8"], {}, "--splits=' 8' is not valid"),
        ([*EXPLAIN, "--splits", "fixed_size"], {}, "max_seq_len=None: the fixed_size rule needs"),
        ([*EXPLAIN, "--kv-dtype", "int4"], {}, "kv_dtype=int4: KV quantised so is served by no backend"),
        ([*EXPLAIN, "--q-len", "17"], {}, "q_len=17: the mosaic backend serves up to 16 query tokens"),
        ([*EXPLAIN, "--window", "0"], {}, "window=0 is out of range"),
        ([*EXPLAIN, "--window", "9", "--plot", "x.png"], {}, "--plot='x.png' draws a plan, and goes with neither"),
        ([*EXPLAIN, "--kv-heads", "5"], {}, "num_q_heads=32 must be a multiple of num_kv_heads=5"),
        (["show", "h300"], {}, "target 'h300' is not known: accepted are a100"),
        (["show", "/nowhere/x.toml"], {}, "target file '/nowhere/x.toml' does not exist or is not a regular file"),
        (["targets"], {"SPLITK_JAX_CONFIG_DIR": "/nowhere"}, "SPLITK_JAX_CONFIG_DIR='/nowhere' is not a folder"),
    ],
    ids=lambda x: str(x)[-40:],
)
def test_refusals_are_one_line_and_exit_2(args, env, message):
    done = run(*args, env=env)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_typo_in_a_copied_file_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("schema = 1\nbase = 'h200'\n[policy]\ntarget_wave = 2\n")
    done = run("explain", "--target", str(path), *EXPLAIN[3:])
    assert done.exit_code == 2
    assert f"{path}: [policy] target_wave=2 is not known: accepted are splits, split_size, target_waves" in done.stderr


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "splitk_jax", "show", "gb10"], capture_output=True, text=True, check=True
    )
    assert "NVIDIA GB10" in done.stdout


def test_explain_compares_targets():
    shape = EXPLAIN[EXPLAIN.index("--q-heads") :]
    done = run("explain", "--compare", "h100, gb10,b200", *shape)
    assert done.exit_code == 0
    for line in ("SMs", "4096: us unsplit"):
        assert line in done.output
    assert [*json.loads(run("explain", "--compare", "h100,gb10", *shape, "--json").output)] == ["h100", "gb10"]
    starved = run("explain", "--compare", "h100,gb10", "--splits", "off", *shape)
    assert "warning, gb10: one sequence fills less than a wave" in " ".join(starved.output.split())
    assert "goes with neither --target nor --plot" in run(*EXPLAIN, "--compare", "h100").stderr
    assert "target 'nope' is not known" in " ".join(run("explain", "--compare", "h100,nope", *shape).stderr.split())


def test_explain_draws(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert run(*EXPLAIN, "--max-decode-seqs", "65", "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    shape = ["--q-heads", "8", "--kv-heads", "1", "--head-dim", "80", "--page-size", "8", "--max-decode-seqs", "3"]
    for rule in ("adaptive", "fixed_size", "off"):
        options = ["--target", "h200", "--splits", rule, "--max-seq-len", "100", "--plot", str(path)]
        assert run("explain", *shape, *options).exit_code == 0
    (tmp_path / "folder.png").mkdir()
    for wrong in (tmp_path / "plan.svg", tmp_path / "none" / "plan.png", tmp_path / "folder.png"):
        done = run(*EXPLAIN, "--plot", str(wrong))
        assert done.exit_code == 2
        assert done.stderr.startswith(f"Error: --plot={str(wrong)!r}")
        assert len(done.stderr.strip().splitlines()) == 1
