"""What lets one kernel's start overlap another's end on CUDA (sm_90). ROCm has none of it: PDL is off there.

With programmatic dependent launch (PDL; the launch option `launch_pdl`) a kernel starts once every program of the one
before has called `gdc_launch_dependents` or ended, and `gdc_wait` waits until that one has ended and all that it wrote
is visible. Three rules keep that as safe as plain launches, whatever runs before and after:

- Every program waits before it ends. So no kernel ends before the one before it: waiting for one is waiting for all.
- Before its wait a kernel writes nothing, and reads nothing, not even weights: they may have been written just before.
  It may `prefetch_l2`, which does not read.
- The exception is a kernel that only one of ours can precede, one that lets it start after its own wait: it may read
  early whatever the one before does not write.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "prefetch_l2"]


@triton.jit
def prefetch_l2(pointers):
    """Bring the 32-byte sectors at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
