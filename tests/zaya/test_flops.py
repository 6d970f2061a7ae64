"""zaya.flops against torch's own operation counter, and against the floors that were written down before."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from zaya.flops import HARDWARE, Shape, block_floor_s, block_work, experts_hit, op_work
from zaya.kernels.router.reference import router_reference

SMALL = Shape(hidden=32, ffn=24, experts=4, router=16)


@pytest.mark.parametrize(("tokens", "forward_ms"), [(32768, 1.06), (8192, 0.26), (512, 0.10), (16, 0.06)])
def test_floors_of_the_block_on_the_h200(tokens, forward_ms):
    assert block_floor_s(tokens, HARDWARE["H200 measured"]) * 1e3 == pytest.approx(forward_ms, abs=0.005)


def test_floor_of_forward_and_backward():
    assert block_floor_s(32768, HARDWARE["H200 measured"], backward=True) * 1e3 == pytest.approx(3.17, abs=0.005)


def test_experts_hit():
    assert experts_hit(1, 16) == pytest.approx(1)
    assert experts_hit(10_000, 16) == pytest.approx(16)


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def experts(x, weights, ids):
    """Every expert's own dense products."""
    up, down = weights
    for e in range(SMALL.experts):
        gate, value = (x[ids == e] @ up[e].T).chunk(2, dim=-1)
        yield (torch.nn.functional.silu(gate) * value) @ down[e].T


def test_block_operations_equal_torchs_count():
    tokens = 40
    x = torch.randn(tokens, SMALL.hidden, requires_grad=True)
    weights = [torch.randn(SMALL.experts, 2 * SMALL.ffn, SMALL.hidden, requires_grad=True)]
    weights.append(torch.randn(SMALL.experts, SMALL.hidden, SMALL.ffn, requires_grad=True))
    ids = torch.arange(tokens) % SMALL.experts
    assert counted(lambda: list(experts(x, weights, ids))) == block_work(tokens, SMALL).flops
    both = counted(lambda: torch.cat(list(experts(x, weights, ids))).sum().backward())
    assert both == block_work(tokens, SMALL, backward=True).flops


def test_router_operations_equal_torchs_count():
    tokens, width, classes = 40, SMALL.router, SMALL.experts + 1
    u = torch.randn(tokens, width, requires_grad=True)
    layers = [torch.randn(n, width, requires_grad=True) for n in (width, width, classes)]
    ones, zeros = torch.ones(width, requires_grad=True), torch.zeros(width)
    fc1, fc2 = ((w, zeros) for w in layers[:2])

    def forward():
        return router_reference(u, None, None, ones, fc1, fc2, layers[2], torch.zeros(classes), 1e-5)

    work = op_work(tokens, SMALL)
    assert counted(forward) == work["router.tail"].flops
    outer, inner, weights = (
        work[f"router.{n}"].flops for n in ("backward_outer", "backward_inner", "weight_gradients")
    )
    recomputed = work["router.tail"].flops + 2 * tokens * width * width  # what the kernels compute a second time
    assert (
        counted(lambda: forward().gate_weights.sum().backward())
        == work["router.tail"].flops + outer + inner + weights - recomputed
    )
