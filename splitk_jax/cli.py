"""The command line: `splitk-jax targets | show | explain | inspect | bench`.

But for `bench` a named target wants no device.
"""

import importlib
import importlib.util
import inspect as python_inspect
import json
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from traceback import walk_tb
from typing import Any

import click
import jax
import jax.numpy as jnp

from splitk_jax import peers, report
from splitk_jax.bench import Options, Run, document, require_plot
from splitk_jax.bench_report import head, plot, tables
from splitk_jax.inspection import Inspection, users_line
from splitk_jax.inspection import inspect as find
from splitk_jax.marks import inspecting
from splitk_jax.pictures import plot_plan
from splitk_jax.plan import DecodePlan
from splitk_jax.policy import load_policy
from splitk_jax.shapes import SUITES
from splitk_jax.target import (
    ENV_OVERRIDES,
    ENV_PREFIX,
    ConfigError,
    Target,
    load_target,
    override_from_text,
    read_environment,
    target_files,
)


class _Refused(click.ClickException):
    """A call that the library refuses: its message, and exit code 2."""

    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, ValueError, TypeError, NotImplementedError) as e:
            raise _Refused(str(e)) from e


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": report.WIDTH})
@click.version_option(package_name="splitk_jax")
def main() -> None:
    """Paged split-K decode attention for JAX: see what a target decides, before anything compiles."""


@main.command()
@_as_json
def targets(as_json: bool) -> None:
    """List the targets: the packaged ones and those in SPLITK_JAX_CONFIG_DIR."""
    config_dir = read_environment().config_dir
    found, broken = [], []
    for name in target_files(config_dir):
        try:
            found.append(load_target(name, config_dir=config_dir))
        except ConfigError as e:
            broken.append(str(e))
    if as_json:
        click.echo(json.dumps([_target_facts(t) for t in found], indent=2))
    else:
        rows = [
            (t.name, t.hardware_name, t.arch, own["backend"], own["splits"], t.source, t.sm_count, t.hbm_gb_per_s)
            for t, own in ((t, dict(t.settings)) for t in found)
        ]
        header = ("target", "part", "arch", "backend", "splits", "file", "SMs", "GB/s")
        click.echo(report.render(report.table("targets", header, rows, left=6)))
    if broken:
        raise _Refused("; ".join(broken))


@main.command()
@click.argument("target", required=False)
@_as_json
def show(target: str | None, as_json: bool) -> None:
    """Show TARGET (a name or a path): its hardware, its tiles, and every setting with its origin.

    Without TARGET: SPLITK_JAX_TARGET, else the first JAX device's. Variables of the environment are laid over the
    file, as they are for a program.
    """
    policy = load_policy(target)
    assert policy.target is not None  # load_policy always names one
    facts = _target_facts(policy.target)
    settings = policy.settings()
    if as_json:
        facts["settings"] = [{"key": k, "value": v, "origin": o} for k, v, o in settings]
        click.echo(json.dumps(facts, indent=2))
        return
    origins = dict(policy.target.origins)
    hardware = [
        (key, ", ".join(value) if isinstance(value, list) else value, origins.get(key, "left out"))
        for key, value in facts["hardware"].items()
    ]
    tile_rows = [["any" if v is None else v for v in asdict(tile).values()] for tile in policy.tiles]
    click.echo(
        report.render(
            report.table(f"{policy.target.name}: hardware", ("key", "value", "origin"), hardware, left=3),
            report.table("settings", ("key", "value", "origin"), settings, left=3),
            report.table("tiles, the first that holds", list(asdict(policy.tiles[0])), tile_rows, left=2),
        )
    )


def _override_flags() -> dict[str, str]:
    """Key -> its flag, spelled as its variable is."""
    return {
        key: "--" + variable.removeprefix(ENV_PREFIX).lower().replace("_", "-")
        for variable, key in ENV_OVERRIDES.items()
    }


def _override_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for (variable, key), flag in zip(
        reversed(ENV_OVERRIDES.items()), reversed(_override_flags().values()), strict=True
    ):
        command = click.option(flag, key, metavar="VALUE", help=f"Goes before {variable}.")(command)
    return command


@main.command()
@click.option("--target", metavar="NAME|PATH", help="Default: SPLITK_JAX_TARGET, else the first JAX device's.")
@click.option("--q-heads", "num_q_heads", type=int, required=True, help="Query heads.")
@click.option("--kv-heads", "num_kv_heads", type=int, required=True, help="KV heads.")
@click.option("--head-dim", type=int, required=True, help="Lanes of a query and a key.")
@click.option("--head-dim-v", type=int, help="Lanes of a value.  [default: head-dim]")
@click.option("--page-size", type=int, required=True, help="Tokens of a page.")
@click.option("--max-decode-seqs", type=int, required=True, help="The most sequences that a launch holds.")
@click.option("--q-dtype", default="bfloat16", show_default=True)
@click.option("--kv-dtype", default="bfloat16", show_default=True)
@click.option("--partial-dtype", default="float32", show_default=True, help="Of splits' outputs between the kernels.")
@click.option("--num-seqs", type=int, help="Static batch bucket, for legacy and adaptive.  [default: max-decode-seqs]")
@click.option("--max-seq-len", type=int, help="Tokens of the longest sequence, for adaptive and fixed_size.")
@click.option("--q-len", type=int, default=1, show_default=True, help="Query tokens of a sequence in one call.")
@click.option("--window", type=int, help="Tokens that a query attends, itself included.  [default: all]")
@click.option("--compare", metavar="TARGET,TARGET,...", help="Put these targets side by side, instead of --target.")
@click.option("--plot", "plot_path", metavar="FILE.png", help="Draw splits and CTAs by context, and split trees.")
@_override_options
@_as_json
def explain(
    target: str | None,
    q_len: int,
    window: int | None,
    compare: str | None,
    plot_path: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Explain the plan for a model's shape: why this split count, what it launches, where each setting is from."""
    if compare is not None and (target is not None or plot_path is not None):
        raise ValueError(f"--compare={compare!r} goes with neither --target nor --plot")
    if plot_path is not None and (q_len != 1 or window is not None):
        raise ValueError(f"--plot={plot_path!r} draws a plan, and goes with neither --q-len nor --window")
    if plot_path is not None:
        require_plot(plot_path)
    overrides = {
        key: override_from_text(flag, key, options[key])
        for key, flag in _override_flags().items()
        if options[key] is not None
    }
    shape = {key: value for key, value in options.items() if key not in _override_flags()}
    call: dict[str, Any] = {"q_len": q_len, "window": window}
    if compare is not None:
        names = [name.strip() for name in compare.split(",")]
        plans = {}
        for name in names:
            try:
                plans[name] = load_policy(name, **overrides).plan(**shape)
            except (ValueError, NotImplementedError) as e:
                raise ValueError(f"--compare, {name}: {e}") from e
        if as_json:
            click.echo(json.dumps({name: plan.report(**call) for name, plan in plans.items()}, indent=2))
        else:
            click.echo(compared(plans, **call))
        return
    plan: DecodePlan = load_policy(target, **overrides).plan(**shape)
    click.echo(json.dumps(plan.report(**call), indent=2) if as_json else plan.explain(**call))
    if plot_path is not None:
        with _written(plot_path):
            plot_plan(plan, plot_path)


@contextmanager
def _written(plot_path: str) -> Generator[None]:
    try:
        yield
    except OSError as e:
        raise ValueError(
            f"--plot={plot_path!r} cannot be written: {e.strerror}; name a file in a folder of yours"
        ) from e


def compared(plans: dict[str, DecodePlan], **call: Any) -> str:
    """Plans of one shape for several targets, a column each; `call` as `DecodePlan.report` takes it."""
    reports = {name: plan.report(**call) for name, plan in plans.items()}
    each = list(reports.values())

    facts = [
        ["SMs", *(r["sm_count"] for r in each)],
        ["GB/s", *(r["hbm_gb_per_s"] for r in each)],
        ["rule", *(r["rule"] for r in each)],
        ["backend", *(r["plan"]["backend"] for r in each)],
        ["splits", *(r["plan"]["num_splits"] for r in each)],
        ["CTAs a sequence", *(r["plan"]["ctas"] for r in each)],
        ["CTAs, all splits", *(r["batches"][0]["ctas"] for r in each)],
        ["waves", *(r["batches"][0]["waves"] for r in each)],
    ]
    contexts = [
        [
            f"{c['tokens']}: {what}",
            *(next((k[key] for k in r["contexts"] if k["tokens"] == c["tokens"]), None) for r in each),
        ]
        for c in each[0]["contexts"]
        for what, key in (("splits", "active_splits"), ("us", "split_us"), ("us unsplit", "unsplit_us"))
    ]
    notes = [f"warning, {name}: {text}\n" for name, r in reports.items() for text in r["warnings"]]
    parts: list[Any] = [
        report.table("decision", ("", *reports), facts),
        report.table("by context", ("", *reports), contexts),
    ]
    return report.render(*parts, *notes)


SPEC = re.compile(r"([a-z][a-z0-9_]*)\[(\s*(?:[0-9]+(?:\s*,\s*[0-9]+)*)?\s*)\](?:\s*,\s*|\s+|$)")
SHORT_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32"}
INSPECTED = "splitk_inspect"


@main.command()
@click.argument("function", metavar="MODULE:FUNCTION|FILE.py[:FUNCTION]")
@click.option(
    "--args",
    "specs",
    metavar="SPEC",
    help="Shapes that it is called with, such as 'bf16[4,32,128] i32[4]'. Without it FUNCTION is called with nothing"
    " and returns (function, args) or (function, args, kwargs).",
)
@_as_json
def inspect(function: str, specs: str | None, as_json: bool) -> None:
    """Inspect a function: each decode and merge call in it, and the split decisions that it froze.

    Nothing is compiled or run, and no device is asked for: SPLITK_JAX_TARGET may name another machine's. FUNCTION is
    splitk_inspect where a FILE alone is named.
    """
    with inspecting():  # a policy that it loads is not compared with this machine's device either
        found = _found(function, specs)
    click.echo(found.to_json() if as_json else str(found))


def _found(function: str, specs: str | None) -> Inspection:
    fn: Any = _import_function(function)
    if specs is not None:
        structs = parse_specs(specs)
        with _users_code():
            return find(fn, *structs)
    if parameters := _required_parameters(fn):
        raise ValueError(
            f"{function} has parameters ({', '.join(parameters)}): give their shapes with --args, such as --args"
            " 'bf16[4,32,128] i32[4]', or name a function without any that returns (function, args)"
        )
    with _users_code():
        made = fn()
    parts = made if isinstance(made, tuple) and len(made) in (2, 3) else (None, None)
    fn, args, kwargs = (*parts, {})[:3]
    inspected = callable(fn) or hasattr(fn, "as_text")
    if not (inspected and isinstance(args, tuple | list) and isinstance(kwargs, dict)):
        got = type(made).__name__
        if isinstance(made, tuple):
            got += f" of ({', '.join(type(part).__name__ for part in made)})"
        raise ValueError(
            f"{function} was called without arguments and returned {got}: accepted is (function, args) or (function,"
            " args, kwargs), args a tuple and kwargs a dict; or give the shapes of its own arguments with --args"
        )
    with _users_code():
        return find(fn, *args, **kwargs)


def _required_parameters(fn: Callable[..., Any]) -> list[str]:
    """Those without a default; none of a callable that does not say."""
    try:
        parameters = python_inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (python_inspect.Parameter.VAR_POSITIONAL, python_inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


@contextmanager
def _users_code(*before: str) -> Generator[None]:
    """What the inspected program raises is told in a line, with the place in it."""
    try:
        yield
    except (Exception, SystemExit) as e:
        message = next(iter(str(e).strip().splitlines()), "")
        line = users_line((frame.f_code.co_filename, n, frame.f_code.co_name) for frame, n in _frames(e))
        raise ValueError(": ".join(part for part in (*before, line, type(e).__name__, message) if part)) from e


def _frames(error: BaseException) -> list[tuple[Any, int]]:
    """The frames of an error, the innermost first."""
    return [*walk_tb(error.__traceback__)][::-1]


def parse_specs(text: str) -> list[Any]:
    """Reads `--args`: dtype[shape] for each argument, between spaces."""
    structs, rest = [], text.strip()
    while rest:
        match = SPEC.match(rest)
        if match is None:
            raise ValueError(
                f"--args: {rest!r} does not begin with an array: accepted is dtype[shape], such as bf16[4,32,128] or"
                " int32[4]"
            )
        try:
            dtype = jnp.dtype(SHORT_DTYPES.get(match[1], match[1]))
            if dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.number):
                raise TypeError  # numpy's own, such as str
        except TypeError:
            raise ValueError(
                f"--args: {match[1]!r} is no dtype: accepted are JAX's names, such as float8_e4m3fn, and"
                f" {', '.join(SHORT_DTYPES)}"
            ) from None
        if (narrowed := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
            raise ValueError(
                f"--args: {match[1]!r} would be narrowed to {narrowed.name}: ask for that, or set JAX_ENABLE_X64=1"
            )
        structs.append(jax.ShapeDtypeStruct(tuple(map(int, match[2].split(","))) if match[2].strip() else (), dtype))
        rest = rest[match.end() :]
    return structs


def _import_function(text: str) -> Callable[..., Any]:
    where, _, name = text.partition(":")
    if not where or (where.startswith(".") and not where.endswith(".py")):
        raise ValueError(f"{text!r} names no module: accepted is module:function or file.py:function")
    path, of_import = Path(where), f"{where!r} cannot be imported"
    if where.endswith(".py"):
        if not path.is_file():
            raise ValueError(f"{where!r} is not a file")
        # As when Python runs the file: what lies beside it can be imported.
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None  # a .py file has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        with _users_code(of_import):
            spec.loader.exec_module(module)
        name = name or INSPECTED
    else:
        sys.path.insert(0, "")
        with _users_code(of_import):
            module = importlib.import_module(where)
    if not name:
        raise ValueError(f"{text!r} names no function: accepted is module:function or file.py:function")
    fn: Any = module
    for part in name.split("."):
        if not hasattr(fn, part):
            whole = f"; {INSPECTED} is taken where a file alone is named" if name == INSPECTED else ""
            raise ValueError(f"{text!r}: {getattr(fn, '__name__', type(fn).__name__)} has no {part!r}{whole}")
        fn = getattr(fn, part)
    if not callable(fn):
        raise ValueError(f"{text!r} is not a function, got {type(fn).__name__}")
    return fn


@main.command()
@click.option(
    "--suite",
    default="decode",
    show_default=True,
    metavar="NAME",
    help=f"Cells: {', '.join(SUITES)}. invariance: one tree against every split count; window: sliding windows, beside"
    " contexts as long; mtp: several query tokens; fp8: quantised caches, beside bfloat16; smoke: small, for a CPU.",
)
@click.option(
    "--peers",
    default="all",
    show_default=True,
    metavar="all|none|NAME,...",
    help=f"Systems to compare with: {', '.join(peers.NAMES)}. One that is not installed is shown as such.",
)
@click.option("--target", metavar="NAME|PATH", help="Default: SPLITK_JAX_TARGET, else the first JAX device's.")
@click.option("--page-size", type=int, help="Only cells with pages of so many tokens.")
@click.option("--only", metavar="TEXT", help="Only cells whose name holds TEXT, such as 'llama3-8b b1 '.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Timed repeats; the best counts.")
@click.option("--seconds", type=float, help="Begin no cell after so many seconds.  [default: no limit]")
@click.option("--json", "json_path", metavar="FILE|-", help="Write JSON for programs, to FILE after every cell.")
@click.option("--plot", "plot_path", metavar="FILE.png", help="Plot time over the read floor by bytes of KV.")
def bench(**options: Any) -> None:
    """Compare the op with dense attention, then time it and its peers on named shapes.

    Exits with 1 when the op is wrong anywhere; what is wrong is not timed. Progress goes to the standard error.
    """
    run = Run(Options.parse(**options), say=lambda text: click.echo(text, err=True))
    json_only = run.options.json_path == "-"
    click.echo(head(run), err=json_only)
    try:
        run.execute()
    except (ValueError, TypeError, NotImplementedError) as e:
        # The group takes these for a refused call; past the options they are a fault, and its traceback is wanted.
        raise RuntimeError("the benchmark failed") from e
    click.echo(json.dumps(document(run), indent=2) if json_only else tables(run))
    if run.options.plot_path is not None:
        with _written(run.options.plot_path):
            plot(run, run.options.plot_path)
    if not_right := run.not_right():
        raise click.ClickException(f"splitk_jax is not right: {'; '.join(not_right)}")


def _target_facts(target: Target) -> dict[str, Any]:
    facts = asdict(target)
    hardware = ("hardware_name", "device_kinds", "arch", "sm_count", "hbm_gb_per_s", "l2_mib", "smem_per_cta_kib")
    return {
        "target": target.name,
        "source": target.source,
        "packaged": target.packaged,
        "hardware": {key.removeprefix("hardware_"): _plain(facts[key]) for key in hardware},
        "declared": dict(target.settings),
        "tiles": [asdict(tile) for tile in target.tiles],
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
