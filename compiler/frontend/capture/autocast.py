"""Forward under torch.autocast, as on the spec's kind of device.

Which operations autocast runs in which dtype is a matter of the device: layer_norm gives float32 on
a GPU, and bfloat16 on a CPU, if it is given that. The dtypes of a graph are those of the device
that the scripts are for; but capture, checks and proofs run on the CPU. So while they do, the CPU's
autocast follows the GPU's lists (https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op
Reference"; aten/src/ATen/autocast_mode.h).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .private import all_operations, implementations, kernel_under, schema_of
from .trees import tree_leaves, tree_map

in_bfloat16 = frozenset(
    ("_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
     "_thnn_fused_lstm_cell", "addmv", "addr", "chain_matmul", "convolution", "cudnn_convolution",
     "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "lstm_cell", "mv",
     "rnn_relu_cell", "rnn_tanh_cell")
)  # fmt: skip
in_the_widest = frozenset(
    ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
     "scatter_add", "tensordot", "vdot")
)  # fmt: skip
"""They take operands of one dtype: the widest of what they are given."""
with_dtype = frozenset(
    ("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "softmax",
     "sum")
)  # fmt: skip
"""They have a dtype as an argument: float32 where the user gives none."""
installed: list[str] = []
"""The kind of device whose lists are in force, innermost last."""


def autocast(dtype: str | None) -> AbstractContextManager[object]:
    """torch.autocast as scripts have it; None: off. A cast weight is not kept for its next use:
    gradients of all uses then add up in float32, whether one stage has them or several do."""
    if dtype is None:
        return nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype), cache_enabled=False)


@contextmanager
def lists_of(kind: str) -> Iterator[None]:
    """Let the CPU's autocast choose dtypes as that of another kind of device does."""
    if kind == "cpu" or installed:
        yield
        return
    installed.append(kind)
    try:
        with implementations() as library:
            for name, overload, only_cpu in autocast_differences():
                fallthrough = torch.library.fallthrough_kernel
                kernel = fallthrough if only_cpu else make_kernel(name, overload)
                qualified = name + f".{overload}" * (overload != "default")
                library.impl(qualified, kernel, "AutocastCPU")
            yield
    finally:
        installed.pop()


def is_autocast(target: str) -> bool:
    """Whether autocast, on some device, chooses the dtype that an operation computes in."""
    namespace, name, overload = target.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return any(kernel_under(function, key) for key in ("AutocastCPU", "AutocastCUDA"))


@cache
def autocast_differences() -> tuple[tuple[str, str, bool], ...]:
    """(name, overload, whether only the CPU's has it) of the operations whose dtype one of two
    autocasts chooses, that of CPUs or that of GPUs."""
    found = []
    for qualified in sorted(all_operations()):
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        function = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if namespace != "aten" or function is None:
            continue
        try:
            on_cpu, on_gpu = (kernel_under(function, f"Autocast{k}") for k in ("CPU", "CUDA"))
        except RuntimeError:  # TorchScript's own: no operator
            continue
        if on_cpu != on_gpu or (on_gpu and name == "grid_sampler"):
            found.append((name, overload or "default", not on_gpu))
    return tuple(found)


@contextmanager
def below_autocast() -> Iterator[None]:
    """No autocast, without a trace of it in what is traced."""
    before, off = torch.is_autocast_enabled("cpu"), False
    torch.set_autocast_enabled("cpu", off)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)


@contextmanager
def regions_of(kind: str) -> Iterator[None]:
    """Let a user's own torch.autocast mean the CPU where it names the device that scripts are for,
    and nothing where it names another."""
    if kind == "cpu":
        yield
        return
    original = torch.autocast.__init__
    swapped = {kind: "cpu", "cpu": kind}

    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,  # noqa: FBT001, FBT002  # torch's
        cache_enabled: bool | None = None,  # noqa: FBT001  # the same
    ) -> None:  # fmt: skip
        usual = torch.get_autocast_dtype(device_type)
        device = swapped.get(device_type, device_type)
        original(self, device, usual if dtype is None else dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def make_kernel(name: str, overload: str) -> Callable[..., object]:
    """What the GPU's autocast does to the operands of one operation."""
    function = getattr(getattr(torch.ops.aten, name), overload)
    names = [argument.name for argument in schema_of(function).arguments]

    def kernel(*args: Any, **kwargs: Any) -> object:
        floats = [t for t in tree_leaves((args, kwargs)) if is_cast(t)]
        with below_autocast():
            if name in with_dtype and "dtype" in names:
                given = dict(zip(names, args, strict=False)) | kwargs
                if is_cast(args[0]) and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                return function(**given)
            wide = any(t.dtype == torch.float32 for t in floats) or name not in in_the_widest
            dtype = torch.bfloat16 if name in in_bfloat16 or not wide else torch.float32
            args, kwargs = tree_map(lambda t: t.to(dtype) if is_cast(t) else t, (args, kwargs))
            return function(*args, **kwargs)

    return kernel


def is_cast(value: object) -> bool:
    """Whether autocast casts it."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
