"""Every use of torch's private interfaces, in one place, each with what is public around it."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from .recipe import full_overwrites
from .user import is_users

fillers = frozenset(target.split(".")[1] for target in full_overwrites)


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes and dtypes but no values, on the CPU."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def storage_address(tensor: torch.Tensor) -> int:
    """An identity of the tensor's storage, valid as long as the storage is held."""
    return int(tensor.untyped_storage()._cdata)


def real_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a real tensor, made outside of any mode."""
    with _disable_current_modes():
        return tensor.detach().clone()


def fake_copy(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape and dtype."""
    return mode.from_tensor(tensor.detach())


def is_data_dependent(error: Exception) -> bool:
    """Whether a trace failed since it needed values."""
    return isinstance(
        error,
        GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException,
    )


def node_name(tensor: torch.Tensor) -> str | None:
    """Name of the traced node that a tensor stands for during export; None outside of a trace."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else str(slot.proxy.node.name)


def running_call() -> tuple[str, int] | None:
    """Path and number of the module call that has just begun, as its nodes will bear them: of a
    module with several names the one that it is called by. None outside of a trace."""
    mode = get_proxy_mode()
    stack = getattr(mode.tracer, "module_stack", None) if mode else None
    if not stack:
        return None
    path, _, number = str(next(reversed(stack))).partition("@")
    return path.partition(".model")[2].removeprefix("."), int(number or 0)


@contextmanager
def no_modes() -> Iterator[None]:
    """Real computation inside of a mode."""
    with _disable_current_modes():
        yield


@contextmanager
def one_trunc_normal(operation: object) -> Iterator[None]:
    """Let every alias of nn.init.trunc_normal_ run `operation`: torch's own looks at values."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = operation  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextmanager
def fakes_convert() -> Iterator[None]:
    """Let model.to(...) convert tensors without values: their data is set, as torch swaps none."""
    original = torch.utils.swap_tensors
    torch.utils.swap_tensors = lambda old, new: setattr(old, "data", new)
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


@contextmanager
def masks_unread() -> Iterator[None]:
    """Let nn.TransformerEncoder and its like not read whether a mask is causal: it is applied as it
    is, unless the user says so."""
    module = nn.modules.transformer
    original: Any = module._detect_is_causal_mask
    patched: Any = lambda _, is_causal=None, __=None: is_causal is True  # noqa: E731
    module._detect_is_causal_mask = patched
    try:
        yield
    finally:
        module._detect_is_causal_mask = original


@contextmanager
def libraries_export() -> Iterator[None]:
    """Let libraries compute as they do during export, where transformers makes masks that it leaves
    to the attention else. A user's own line is told the truth: it is to do the same either way."""
    names = ("is_compiling", "is_exporting")
    originals = {name: getattr(torch.compiler, name) for name in names}

    def exporting() -> bool:
        frame = inspect.currentframe()
        caller = frame and frame.f_back
        return bool(caller and "site-packages" in caller.f_code.co_filename)

    for name in names:
        setattr(torch.compiler, name, exporting)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.compiler, name, original)


@contextmanager
def on_autograd_function(
    take: Callable[[type, Callable[..., object], tuple[object, ...]], object],
) -> Iterator[None]:
    """Call `take` with the class, torch's own apply and the arguments where a user's
    torch.autograd.Function is applied, but for those that another one's forward applies.

    What is patched lies below Function.apply, which people bind to a name of their own.
    """
    base: Any = torch.autograd.function._SingleLevelFunction
    running: list[type] = []

    def apply(cls: Any, /, *args: object, **kwargs: object) -> object:
        plain = super(base, cls).apply
        if cls.__module__.startswith("torch.") or running or kwargs:  # of which torch takes none
            return plain(*args, **kwargs)
        running.append(cls)
        try:
            return take(cls, plain, args)
        finally:
            running.pop()

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


@contextmanager
def on_tensor_hook(refuse: Callable[[], object]) -> Iterator[None]:
    """Call `refuse` where a user's line puts a hook on a tensor's gradient; torch does so, too."""
    original = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., object]) -> object:
        frame = inspect.currentframe()
        if frame and frame.f_back and is_users(frame.f_back.f_code.co_filename):
            refuse()
        return original(tensor, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


@contextmanager
def checkpoints_plain(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Call what torch.utils.checkpoint is given directly, within `around()`, by whatever name the
    user imported it: values are the same, and batch norms count a microbatch once."""
    module: Any = torch.utils.checkpoint

    def generator(*_: object, **__: object) -> Iterator[None]:
        with around():
            yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., object], _: object, *args: object) -> object:
            with around():
                return function(*args)

    patches = {"_checkpoint_without_reentrant_generator": generator, "CheckpointFunction": Plain}
    originals = {name: getattr(module, name) for name in patches}
    for name, patch in patches.items():
        setattr(module, name, patch)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


@contextmanager
def regions_flat() -> Iterator[None]:
    """Let an export leave no_grad and autocast regions as they ran, with marks where they begin and
    end: of the sub-graphs that torch makes of them, a no_grad in an autocast is lost."""
    modules = replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass
    originals = {module: getattr(module, module.__name__.split(".")[-1]) for module in modules}
    for module, original in originals.items():
        setattr(module, original.__name__, lambda *graph_and_signature: graph_and_signature)
    try:
        yield
    finally:
        for module, original in originals.items():
            setattr(module, original.__name__, original)


def functional_form(target: str) -> str | None:
    """`aten.relu.default` for `aten.relu_.default`; None where none has equal arguments, and for
    what fills a tensor, since Python has no `x.exponential()`."""
    namespace, name, overload = target.split(".")
    if namespace != "aten" or not name.endswith("_") or name.startswith("__") or name in fillers:
        return None
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    wanted = signature(getattr(getattr(torch.ops.aten, name), overload))
    overloads = packet.overloads() if packet is not None else ()
    found = (getattr(packet, other) for other in sorted(overloads, key=overload.__ne__))
    return next((str(function) for function in found if signature(function) == wanted), None)


def is_autocast(target: str) -> bool:
    """Whether autocast, on some device, chooses the dtype that an operation computes in."""
    namespace, name, overload = target.split(".")
    qualified = f"{namespace}::{name}" + f".{overload}" * (overload != "default")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(qualified, key) for key in ("AutocastCPU", "AutocastCUDA"))


@cache
def autocast_differences() -> tuple[tuple[str, str, bool], ...]:
    """(name, overload, whether only the CPU's has it) of the operations whose dtype one of two
    autocasts chooses, that of CPUs or that of GPUs."""
    found = []
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        overload = schema.overload_name
        if namespace != "aten" or not hasattr(torch.ops.aten, name):
            continue
        qualified = f"{schema.name}.{overload}" if overload else schema.name
        try:
            on_cpu, on_gpu = (has_kernel(qualified, f"Autocast{k}") for k in ("CPU", "CUDA"))
        except RuntimeError:  # TorchScript's own: no operator
            continue
        if on_cpu != on_gpu or (on_gpu and name == "grid_sampler"):
            found.append((name, overload or "default", not on_gpu))
    return tuple(found)


def below_autocast() -> AbstractContextManager[object]:
    """No autocast, without a trace of it in what is traced."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def signature(function: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of an operation's arguments."""
    return [(a.name, str(a.type)) for a in function._schema.arguments]


def flop_formula(func: torch._ops.OpOverload) -> Callable[..., int] | None:
    """Torch's own formula for an operation's FLOPs, from its arguments and result."""
    return flop_registry.get(func._overloadpacket)
