"""`inspect`: the split decisions that a function froze, read from its trace before anything compiles.

What is shown is read from the jaxpr that runs: the plan is a parameter of an equation in it (`marks.py`), kernel names
and grids are the kernel calls' own. Lowered, compiled and exported functions have no jaxpr any more; of them the names
in their text are read.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from splitk_jax import marks, report
from splitk_jax.plan import DecodePlan

KERNEL = "splitk_"
OWN_FOLDER = str(Path(__file__).parent)
JAX_FOLDER = str(Path(jax.__file__).parent)

IN_TEXT = re.compile(rf"{marks.DECODE}_s(\d+)_([a-z]+)_([0-9a-f]{{16}})")
KERNEL_IN_TEXT = re.compile(r"splitk_(?:[a-z]+_)?(?:split|combine)_s\d+(?:_t\d+(?:x\d+)?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the library in a function.

    Attributes:
      kind: `decode` or `merge`.
      where: what it is inside of, outermost first: `scan of 32`, `while`, `branch 1 of cond`, `shard_map`, ...
      times: how often one run of the function makes it; None where that is not static: in a while loop or a branch.
      source: the line that makes it, `file:line (function)`; None where it is not known.
      batch, q_len: of the queries, static; None in text.
      num_splits, backend, fingerprint: the plan's; None for a merge.
      kernels: names of the kernels, as lowered text has them, with the launch grid of each; the grid is None where the
        backend has none, or in text.
      window, softcap: static decisions beside the plan's.
      plan: the plan; None for a merge, and in text.
    """

    kind: str
    where: tuple[str, ...] = ()
    times: int | None = 1
    source: str | None = None
    batch: int | None = None
    q_len: int | None = None
    num_splits: int | None = None
    backend: str | None = None
    fingerprint: str | None = None
    kernels: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    window: int | None = None
    softcap: float | None = None
    plan: DecodePlan | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The calls of a function, in program order; prints as a table.

    Attributes:
      calls: each `Call`.
    """

    calls: tuple[Call, ...]

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, i: int) -> Call:
        return self.calls[i]

    def report(self) -> list[dict[str, Any]]:
        """The calls as plain values for programs; a plan as its `report`."""
        return [
            {key: value for key, value in asdict(replace(call, plan=None)).items() if key != "plan"}
            | {"plan": None if call.plan is None else call.plan.report()["plan"]}
            for call in self.calls
        ]

    def to_json(self) -> str:
        """`report` as JSON."""
        return json.dumps(self.report(), indent=2)

    def __str__(self) -> str:
        if not self.calls:
            return "no call of splitk_jax\n"
        rows = [
            (
                call.kind,
                call.source or "-",
                " > ".join(call.where) or "-",
                "?" if call.times is None else call.times,
                _or_dash(call.batch),
                _or_dash(call.q_len),
                _or_dash(call.num_splits),
                call.backend or "-",
                call.fingerprint or "-",
            )
            for call in self.calls
        ]
        # Layers of a model follow one another: equal lines are one.
        lines = [(len(list(same)), *row) for row, same in itertools.groupby(rows)]
        header = ("calls", "kind", "at", "in", "times", "batch", "q_len", "splits", "backend", "plan")
        kernels = dict.fromkeys((call.fingerprint or "-", *kernel) for call in self.calls for kernel in call.kernels)
        launches = [(plan, name, "-" if grid is None else " x ".join(map(str, grid))) for plan, name, grid in kernels]
        return report.render(
            report.table("calls", header, lines, left=4),
            report.table("kernels", ("plan", "kernel", "grid"), launches, left=3),
        )


def inspect(fn: Any, *args: Any, **kwargs: Any) -> Inspection:
    """Finds every decode and merge call in a function, without compiling or running it; no device is needed.

    Args:
      fn: a function, jitted or not; or what became of one: `jax.stages.Traced`, `Lowered`, `Compiled`,
        `jax.export.Exported`, of which the text is read.
      *args, **kwargs: what it would be called with; `jax.ShapeDtypeStruct` will do for arrays. For a function that is
        not jitted, arguments without a shape and dtype are passed as they are.

    Returns:
      The calls, in program order. Of a text, each different call once.

    Raises:
      TypeError: arguments for what is lowered already.
      Whatever tracing the function raises.
    """
    text = _text(fn)
    if text is not None or isinstance(fn, jax.stages.Traced):
        if args or kwargs:
            raise TypeError(f"fn={type(fn).__name__} is traced already: accepted is no further argument")
        return Inspection(_calls_in_text(text)) if text is not None else Inspection(_calls(fn.jaxpr))
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, or a jax.stages.Traced, Lowered or Compiled, or a jax.export.Exported, got"
            f" {type(fn).__name__}"
        )
    if hasattr(fn, "trace"):
        return Inspection(_calls(fn.trace(*args, **kwargs).jaxpr))
    return Inspection(_calls(_trace(fn, args, kwargs)))


def _text(fn: Any) -> str | None:
    if isinstance(fn, jax.export.Exported):
        return str(fn.mlir_module())
    if isinstance(fn, jax.stages.Lowered):
        return fn.as_text(debug_info=True)
    if isinstance(fn, jax.stages.Compiled):
        return fn.as_text() or ""
    return None


def _trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The jaxpr of a function that is not jitted, over its leaves that are arrays."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def call(*traced: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(arrays, traced, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        fn(*args, **kwargs)  # what it returns need not be arrays

    return jax.make_jaxpr(call)(*(leaves[i] for i in arrays))


def _calls_in_text(text: str) -> tuple[Call, ...]:
    kernels = dict.fromkeys(match.group() for match in KERNEL_IN_TEXT.finditer(text))
    calls = [
        Call(
            kind="decode",
            times=None,
            num_splits=int(splits),
            backend=backend,
            fingerprint=fingerprint,
            kernels=tuple((name, None) for name in kernels if re.search(rf"_s{splits}(?!\d)", name)),
        )
        for splits, backend, fingerprint in dict.fromkeys(match.groups() for match in IN_TEXT.finditer(text))
    ]
    if marks.MERGE in text:
        calls.append(Call(kind="merge", times=None))
    return tuple(calls)


def _calls(closed: Any) -> tuple[Call, ...]:
    return tuple(_walk(getattr(closed, "jaxpr", closed), (), 1, None))


def _walk(jaxpr: Any, where: tuple[str, ...], times: int | None, source: str | None) -> Iterator[Call]:
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive.name, equation.params
        name = str(params.get("name", ""))
        # A cached trace of an inner function was made elsewhere: the outermost line of ours is the call's.
        line = _source(equation) or source
        if name.startswith(marks.DECODE):
            yield _decode_call(params["jaxpr"], where, times, line)
            continue
        if name == marks.MERGE:
            yield Call(kind="merge", where=where, times=times, source=line)
            continue
        for label, count, inner in _bodies(primitive, params):
            inside = where if label is None else (*where, label)
            yield from _walk(inner, inside, None if times is None or count is None else times * count, line)


def _decode_call(closed: Any, where: tuple[str, ...], times: int | None, source: str | None) -> Call:
    equations = list(_equations(getattr(closed, "jaxpr", closed)))
    (mark,) = (equation for equation in equations if equation.primitive is marks.plan_p)
    plan: DecodePlan = mark.params["plan"]
    # [batch, q_len, heads, head_dim]; under `vmap` with the mapped axis before them.
    batch, q_len = mark.invars[0].aval.shape[-4:-2]
    names = [(str(e.params.get("name", "")), _grid(e)) for e in equations]
    return Call(
        kind="decode",
        where=where,
        times=times,
        source=source,
        batch=batch,
        q_len=q_len,
        num_splits=plan.num_splits,
        backend=plan.backend,
        fingerprint=plan.fingerprint(),
        kernels=tuple(dict.fromkeys((name, grid) for name, grid in names if name.startswith(KERNEL))),
        window=mark.params["window"],
        softcap=mark.params["softcap"],
        plan=plan,
    )


def _grid(equation: Any) -> tuple[int, ...] | None:
    """The grid of a kernel launch; None for what is none."""
    meshes = equation.params.get("meshes") or ()
    return tuple(meshes[0].grid) if meshes else None


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        if not equation.params.get("meshes"):  # a kernel's body is not the program's
            for _, _, inner in _bodies(equation.primitive.name, equation.params):
                yield from _equations(inner)


def _bodies(primitive: str, params: dict[str, Any]) -> Iterator[tuple[str | None, int | None, Any]]:
    """(label, how often it runs or None, jaxpr) of each jaxpr in an equation; no label where it runs just once."""
    if primitive == "scan":
        yield f"scan of {params['length']}", params["length"], params["jaxpr"].jaxpr
    elif primitive == "while":
        yield "while", None, params["cond_jaxpr"].jaxpr
        yield "while", None, params["body_jaxpr"].jaxpr
    elif primitive == "cond":
        for i, branch in enumerate(params["branches"]):
            yield f"branch {i} of cond", None, branch.jaxpr
    else:
        label = {"shard_map": "shard_map", "checkpoint": "remat", "remat2": "remat"}.get(primitive)
        for value in params.values():
            for each in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield label, 1, inner


def _source(equation: Any) -> str | None:
    """The innermost line that is neither JAX's nor the library's."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith((OWN_FOLDER, JAX_FOLDER, "<")):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name.split('.')[-1]})"
    return None


def _or_dash(value: int | None) -> Any:
    return "-" if value is None else value
