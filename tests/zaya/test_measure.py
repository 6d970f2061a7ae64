"""zaya.measure: the numbers are times of calls, medians are medians, and nothing passes for a measurement."""

import time

import pytest
import torch

from zaya.measure import summarise, time_call


def test_median_and_spread():
    timing = summarise([float(x) for x in range(1, 102)], "wall")
    assert (timing.median_ms, timing.p10_ms, timing.p90_ms, timing.repeats) == (51.0, 11.0, 91.0, 101)
    assert summarise([3.0], "wall").median_ms == 3.0
    with pytest.raises(ValueError, match="at least 1"):
        summarise([], "wall")


def test_wall_clock_sees_the_time_of_one_call():
    timing = time_call(lambda: time.sleep(0.02), "cpu", budget_s=0.2)
    assert timing.method == "wall"
    assert 20 <= timing.p10_ms <= timing.median_ms < 60


def test_callables_take_turns():
    seen = []
    time_call([lambda: seen.append("a"), lambda: seen.append("b")], "cpu", budget_s=0.0, min_repeats=6)
    assert abs(seen.count("a") - seen.count("b")) <= 1


def test_a_failing_call_is_not_a_number():
    def call():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        time_call(call, "cpu")


@pytest.mark.gpu
def test_gpu_events_and_graphs_agree_on_a_long_kernel():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    events, graph = (time_call(lambda: a @ a, "cuda", graph=g, budget_s=0.1) for g in (False, True))
    assert events.method == "events"
    assert graph.method == "graph"
    assert 0.7 < events.median_ms / graph.median_ms < 1.4
