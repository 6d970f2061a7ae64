"""The one way to time things: device events or graph replay on a GPU, the wall clock on a CPU; median and spread.

Device work is asynchronous, caches remember, and the first calls compile: `time_call` warms up, waits, repeats, and
keeps the cache cold between repeats. Pass several callables that do the same on different data (the layers of a model,
say) to have them run in turn, so that no weights are found in a cache where a real step would not find them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

COLD_BYTES = 512 * 10**6  # written between repeats; several times the L2 of any GPU so far


@dataclass(frozen=True)
class Timing:
    """Time of one call: median and the 10th and 90th percentile over `repeats`, and how it was taken."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int
    method: str  # "events", "graph" or "wall"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(samples_ms: Sequence[float], method: str) -> Timing:
    """Median and spread of samples in milliseconds. Raises ValueError when there is none."""
    if not samples_ms:
        raise ValueError("no samples to summarise: repeats must be at least 1")
    ordered = sorted(samples_ms)
    tenth = (len(ordered) - 1) // 10
    return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered), method)


def time_call(
    calls: Callable[[], Any] | Sequence[Callable[[], Any]],
    device: torch.device | str,
    graph: bool = False,
    budget_s: float = 0.5,
    min_repeats: int = 5,
) -> Timing:
    """Time of one call on `device`, within about `budget_s` seconds of measuring.

    `graph` captures all calls in one CUDA graph and times its replays: the launches of Python are not in the number.
    Raises what the call raises, and RuntimeError when a call cannot be captured.
    """
    calls = [calls] if callable(calls) else list(calls)
    if torch.device(device).type != "cuda":
        return _time_wall(calls, budget_s, min_repeats)
    return _time_graph(calls, budget_s, min_repeats) if graph else _time_events(calls, budget_s, min_repeats)


def _repeats(one_s: float, budget_s: float, least: int) -> int:
    return max(least, min(1000, int(budget_s / max(one_s, 1e-6))))


def _time_wall(calls: list, budget_s: float, least: int) -> Timing:
    def once(call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    first = [once(call) for call in calls]
    one = min(first + [once(calls[0])])
    rounds = _repeats(one, budget_s, least)
    return summarise([once(calls[i % len(calls)]) * 1e3 for i in range(rounds)], "wall")


def _between(run: Callable[[], Any], cold: torch.Tensor | None) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if cold is not None:
        cold.zero_()
    start.record()
    run()
    end.record()
    return start, end


def _events(run: Callable[[int], Any], rounds: int, cold: torch.Tensor | None) -> list[float]:
    pairs = [_between(lambda i=i: run(i), cold) for i in range(rounds)]  # type: ignore[misc]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _warm_up(calls: list, seconds: float = 0.05) -> float:
    """Run until compiled and clocked up; seconds per call at the end."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        calls[done % len(calls)]()
        torch.cuda.synchronize()
        done += 1
    return (time.perf_counter() - start) / done


def _time_events(calls: list, budget_s: float, least: int) -> Timing:
    rounds = _repeats(_warm_up(calls), budget_s, least)
    cold = torch.empty(COLD_BYTES, dtype=torch.int8, device="cuda")
    return summarise(_events(lambda i: calls[i % len(calls)](), rounds, cold), "events")


def capture(calls: list) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all calls in order, warmed up on the side stream that capturing needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls * 2:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _time_graph(calls: list, budget_s: float, least: int) -> Timing:
    """The graph holds each call once; one call's time is the replay's over their number. The cache is left alone: with
    enough callables they evict each other, as layers do."""
    graph = capture(calls)
    rounds = _repeats(_warm_up([graph.replay]), budget_s, least)
    samples = _events(lambda _: graph.replay(), rounds, None)
    return summarise([x / len(calls) for x in samples], "graph")
