"""FlashInfer's paged attention as a peer: a program of its own, since it needs torch on the GPU that JAX uses.

One JSON request a line on stdin, one JSON answer a line on stdout, until stdin ends; `peers.FlashInfer` is the other
side. Imports nothing of this package.
"""

import importlib
import itertools
import json
import os
import sys
import traceback
from typing import Any

WORKSPACE_BYTES = 512 << 20
CHECKED_ROWS = 8
"""Sequences that are compared with dense attention: some, first and last among them."""


def main() -> None:
    # What libraries and compilers print must not reach the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.nice(10)  # compilation must not hold up the process that measures
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = warm(request["warm"], request["windowed"]) if "warm" in request else measure(request)
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
            traceback.print_exc()
            answer = {"reason": " ".join(f"{type(e).__name__}: {e}".split())[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def wrapper(torch: Any, request: dict[str, Any], indptr: Any, indices: Any, last_page_len: Any) -> Any:
    """A planned wrapper of the tensor-core FA2 kernel: decode, or prefill where there are several query tokens."""
    flashinfer = importlib.import_module("flashinfer")
    work = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    q_len, window = request["q_len"], request["window"]
    shape = [request[key] for key in ("num_q_heads", "num_kv_heads", "head_dim", "page_size")]
    options = {
        "window_left": -1 if window is None else window - 1,  # tokens before a query that it attends
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }
    if q_len == 1:
        result = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=True, backend="fa2")
        result.plan(indptr, indices, last_page_len, *shape, **options)
    else:
        result = flashinfer.BatchPrefillWithPagedKVCacheWrapper(work, "NHD", backend="fa2")
        # Its causal mask ends with the last query at the last key.
        starts = torch.arange(len(indptr), dtype=torch.int32) * q_len
        result.plan(starts, indptr, indices, last_page_len, *shape, causal=True, **options)
    return result


def warm(head_dim: int, windowed: bool) -> dict[str, Any]:
    """Compiles the kernels of one head_dim, with a window or without: all else is an argument of them."""
    torch = importlib.import_module("torch")
    shape = {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": head_dim, "page_size": 16}
    request = shape | {"q_len": 1, "window": 16 if windowed else None}
    one = torch.ones(1, dtype=torch.int32)
    wrapper(torch, request, torch.tensor([0, 1], dtype=torch.int32), torch.zeros_like(one, device="cuda"), one)
    return {"head_dim": head_dim, "windowed": windowed}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Checks and times one cell.

    Args:
      request: num_q_heads, num_kv_heads, head_dim, page_size, seq_lens and window (tokens; None for no window), q_len
        (query tokens of a sequence), layers, pools, calls, repeats.

    Returns:
      error: the largest relative error of a checked row and head.
      queued_us: microseconds a layer: `calls` replays of a CUDA graph of all layers, the best of `repeats`.
      kernel_us: microseconds of kernels a layer; None where torch's profiler saw none.
    """
    torch = importlib.import_module("torch")
    torch.cuda.empty_cache()  # the last cell's pools have other shapes
    page_size, seq_lens, layers = request["page_size"], request["seq_lens"], request["layers"]
    q_len = request["q_len"]
    counts = [-(-n // page_size) for n in seq_lens]
    pool = (sum(counts), page_size, request["num_kv_heads"], request["head_dim"])
    pools = [
        tuple(torch.randn(pool, device="cuda", dtype=torch.bfloat16) for _ in ("k", "v"))
        for _ in range(request["pools"])
    ]
    q = torch.randn(len(seq_lens) * q_len, request["num_q_heads"], pool[-1], device="cuda", dtype=torch.bfloat16)
    starts = [0, *itertools.accumulate(counts)]
    indices = torch.randperm(pool[0], device="cuda").int()
    decode = wrapper(
        torch,
        request,
        torch.tensor(starts, dtype=torch.int32),
        indices,
        torch.tensor([(n - 1) % page_size + 1 for n in seq_lens], dtype=torch.int32),
    )
    out = torch.empty_like(q)
    decode.run(q, pools[0], out=out)
    step = max((len(seq_lens) - 1) // (CHECKED_ROWS - 1), 1)
    error = 0.0
    for row in {*range(0, len(seq_lens), step), len(seq_lens) - 1}:
        pages = indices[starts[row] : starts[row + 1]].long()
        k, v = (x[pages] for x in pools[0])
        own = slice(row * q_len, (row + 1) * q_len)
        expected = dense(torch, q[own], k, v, seq_lens[row], request["window"])
        difference = torch.linalg.vector_norm(out[own].float() - expected, dim=-1)
        relative = (difference / torch.linalg.vector_norm(expected, dim=-1)).max().item()
        error = max(error, relative) if relative == relative else float("inf")

    def step() -> None:
        for layer in range(layers):
            decode.run(q, pools[layer % len(pools)], out=out)

    return {
        "error": error,
        "queued_us": graph_us(torch, step, request) / layers,
        "kernel_us": kernel_us(torch, step, layers),
    }


def dense(torch: Any, q: Any, k: Any, v: Any, seq_len: int, window: int | None) -> Any:
    """Attention of one sequence without splits, in float32.

    Args:
      q: [q_len, num_q_heads, head_dim]: the last tokens, each attending up to itself.
      k, v: [pages, page_size, num_kv_heads, head_dim].
      seq_len: tokens.
      window: tokens that a query attends, itself included; None for all.
    """
    k, v = (x.flatten(0, 1)[:seq_len].float() for x in (k, v))
    grouped = q.float().view(q.shape[0], k.shape[1], -1, k.shape[2])
    logits = torch.einsum("qhgd,thd->hgqt", grouped, k) * k.shape[2] ** -0.5
    key = torch.arange(seq_len, device=q.device)
    query = key[seq_len - q.shape[0] :, None]
    live = key <= query
    if window is not None:
        live &= key > query - window
    p = torch.softmax(logits.masked_fill(~live, float("-inf")), dim=-1)
    return torch.einsum("hgqt,thd->qhgd", p, v).flatten(1, 2)


def graph_us(torch: Any, run: Any, request: dict[str, Any]) -> float:
    """Microseconds of one run in a CUDA graph, replayed back to back."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for attempt in range(request["repeats"] + 1):  # the first warms up
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(request["calls"]):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if attempt:
            best = min(best, begin.elapsed_time(end) * 1e3 / request["calls"])
    return best


def kernel_us(torch: Any, run: Any, layers: int) -> float | None:
    """Microseconds of kernels a layer, by torch's profiler."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        total = sum(event.self_device_time_total for event in profiler.key_averages())
    except (RuntimeError, AssertionError, AttributeError):  # no CUPTI, or another torch
        traceback.print_exc()
        return None
    return total / layers or None


if __name__ == "__main__":
    main()
