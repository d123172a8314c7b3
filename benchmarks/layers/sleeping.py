"""A layer whose time is spent asleep, so that ranks do not compete for cores.

Its times come from VIRTUAL_FORWARD_MS and VIRTUAL_BACKWARD_MS, 0 where they are not set: one
compilation serves for all of them. The arithmetic lies inside the time.
"""

import ctypes
import os
import sys
import time
from statistics import median

import torch
from torch import Tensor

if os.environ.get("VIRTUAL_PINNED"):  # a core for each rank, as threads of two may share one
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
FORWARD_S = float(os.environ.get("VIRTUAL_FORWARD_MS", 0)) / 1e3
BACKWARD_S = float(os.environ.get("VIRTUAL_BACKWARD_MS", 0)) / 1e3
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK, ns: 50 us by default


def overshoot():
    """Seconds by which this process oversleeps."""
    taken = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(1e-3)
        taken.append(time.perf_counter() - start - 1e-3)
    return median(taken)


LATE_S = overshoot() if FORWARD_S + BACKWARD_S else 0.0


def sleep_until(end):
    time.sleep(max(0.0, end - time.perf_counter() - LATE_S))


@torch.library.custom_op("virtual::layer", mutates_args=())
def layer(x: Tensor, weight: Tensor, width: int) -> Tensor:
    """x * weight in as many features as there are weights. What lies behind these is memory as it
    comes: large values are there to be sent, and to write them would take a core."""
    end, kept = time.perf_counter() + FORWARD_S, weight.numel()
    out = x.new_empty(x.shape[0], width)
    torch.mul(x[:, :kept], weight, out=out[:, :kept])
    sleep_until(end)
    return out


@layer.register_fake
def _(x, weight, width):
    return x.new_empty(x.shape[0], width)


def keep(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx, grad):
    end = time.perf_counter() + BACKWARD_S
    x, weight = ctx.saved_tensors
    kept, back = weight.numel(), None
    if ctx.needs_input_grad[0]:
        back = x.new_empty(x.shape)
        torch.mul(grad[:, :kept], weight, out=back[:, :kept])
    weight_grad = (grad[:, :kept] * x[:, :kept]).sum(0)
    sleep_until(end)
    return back, weight_grad, None


layer.register_autograd(backward, setup_context=keep)
