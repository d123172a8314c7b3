"""Every use of torch's private interfaces, in one place, each with what is public around it.

A later torch may be without a name: then another way is taken, which each says, or the name is
refused here, by a message. tests/test_private.py hides the names one by one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...errors import CaptureError
from ...version import tested_torch
from .patched import patched

try:
    from torch._C import Argument, FunctionSchema
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:  # nothing stands in for these
    raise CaptureError(
        f"torch {torch.__version__} is not as ppc knows it: {str(error).partition(' (')[0]}",
        hint=f"a torch that ppc is tested with, {tested_torch}",
    ) from error

__all__ = ["Argument", "FakeTensorMode", "FunctionSchema", "OpOverload", "TorchDispatchMode"]


def find(path: str) -> Any:
    """What torch has under a private name; None in a version that has it no more."""
    module, _, name = path.rpartition(".")
    with suppress(ImportError):
        return getattr(import_module(module), name, None)
    return None


weak_reference: Any = torch.multiprocessing.reductions.StorageWeakRef
disable_modes = find("torch.utils._python_dispatch._disable_current_modes")
flop_registry = find("torch.utils.flop_counter.flop_registry")
own_definitions = find("torch._library.custom_ops.OPDEFS")


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes and dtypes but no values, on the CPU."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def storage_address(tensor: torch.Tensor) -> int:
    """An identity of the tensor's storage, valid as long as the storage is held."""
    storage = tensor.untyped_storage()
    address = getattr(storage, "_cdata", None)
    return int(weak_reference(storage).cdata if address is None else address)


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
    """Real computation inside of a mode: without any, or past all of them."""
    with disable_modes() if disable_modes else torch._C._DisableTorchDispatch():
        yield


def one_trunc_normal(operation: object) -> AbstractContextManager[None]:
    """Let nn.init.trunc_normal_ run `operation`, as torch's own looks at values: by every name that
    it was imported by, or by its own alone."""
    inner = "_no_grad_trunc_normal_"
    return patched(nn.init, **{inner if hasattr(nn.init, inner) else "trunc_normal_": operation})


def masks_unread() -> AbstractContextManager[None]:
    """Let nn.TransformerEncoder and its like not read whether a mask is causal: it is applied as it
    is, unless the user says so. If they read it in another way, that is refused."""

    def detect(_: object, is_causal: bool | None = None, __: object = None) -> bool:  # noqa: FBT001  # torch's
        return is_causal is True

    module, name = nn.modules.transformer, "_detect_is_causal_mask"
    return patched(module, **{name: detect} if hasattr(module, name) else {})


Take = Callable[[type, Callable[..., object], tuple[object, ...]], object]
takers: list[Take] = []
"""Who is told where a torch.autograd.Function is applied, the innermost last."""


@cache
def watch_functions() -> None:
    """Let takers see every apply, by whatever name a module has it that is imported after this:
    torch 2.14 has nothing below Function.apply, and what is bound to that escapes a later patch."""
    function: Any = torch.autograd.Function
    below = find("torch.autograd.function._SingleLevelFunction")
    base = below if below and isinstance(vars(function).get("apply"), classmethod) else function
    own = vars(base).get("apply")

    def apply(cls: Any, /, *args: object, **kwargs: object) -> object:
        plain = own.__get__(None, cls) if own else super(base, cls).apply
        if cls.setup_context is not function.setup_context:  # then torch fills in what is not given
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if not takers or kwargs or cls.__module__.startswith("torch."):  # torch takes no kwargs
            return plain(*args, **kwargs)
        take = takers.pop()
        try:
            return take(cls, plain, args)
        finally:
            takers.append(take)

    base.apply = classmethod(apply)


@contextmanager
def on_autograd_function(take: Take) -> Iterator[None]:
    """Call `take` with the class, torch's own apply and the arguments where a user's
    torch.autograd.Function is applied, but for those that another one's forward applies."""
    watch_functions()
    takers.append(take)
    try:
        yield
    finally:
        takers.pop()


def checkpoints_plain(
    around: Callable[[], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Call what torch.utils.checkpoint is given directly, within `around()`, by whatever name the
    user imported it: values are the same, and batch norms count a microbatch once."""
    module = import_module("torch.utils.checkpoint")

    def generator(*_: object, **__: object) -> Iterator[None]:
        with around():
            yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., object], _: object, *args: object) -> object:
            with around():
                return function(*args)

    own = {*inspect.signature(module.checkpoint).parameters, "preserve_rng_state"}

    def plain(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        with around():
            return function(*args, **{k: v for k, v in kwargs.items() if k not in own})

    name = "_checkpoint_without_reentrant_generator"
    called = f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # since torch 2.14
    inner = {called: generator, "CheckpointFunction": Plain}
    known = all(hasattr(module, name) for name in inner)
    return patched(module, **inner if known else {"checkpoint": plain})  # by this name alone


def uncompiled() -> AbstractContextManager[None]:
    """Let an export not compile the text of its graphs, of which none runs: a tenth of its time."""
    lazy: Any = find("torch.fx._lazy_graph_module._use_lazy_graph_module")
    return lazy(should_use=True) if lazy else nullcontext()


@contextmanager
def regions_flat() -> Iterator[None]:
    """Let an export leave no_grad and autocast regions as they ran, with marks where they begin and
    end: of sub-graphs made of them a no_grad in an autocast is lost. Any that stay are refused."""
    with ExitStack() as stack:
        for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass"):
            path = f"torch._export.passes.{name}"
            if find(f"{path}.{name}"):
                stack.enter_context(patched(import_module(path), **{name: lambda *made: made}))
        yield


def kernel_under(function: OpOverload, key: str) -> bool:
    """Whether an operation has a kernel of its own under a dispatch key."""
    return bool(function.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)))


def all_operations() -> list[str]:
    """`aten::add.Tensor` and all others that torch has registered."""
    names = find("torch._C._dispatch_get_all_op_names")
    if names:
        return list(names())
    schemas = torch._C._jit_get_all_schemas()  # with TorchScript's own
    return [s.name + f".{s.overload_name}" * bool(s.overload_name) for s in schemas]


@contextmanager
def implementations() -> Iterator[Any]:
    """A library that implements torch's own operations anew, as long as this lasts."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        yield library
    finally:
        library._destroy()


def flop_formula(func: OpOverload) -> Callable[..., int] | None:
    """Torch's formula for FLOPs, from arguments and result; or its counter, which runs it again."""

    def count(*args: object, out_val: object, **kwargs: object) -> int:  # noqa: ARG001  # as torch's
        with FlopCounterMode(display=False) as counter:
            func(*args, **kwargs)
        return int(counter.get_total_flops())

    return count if flop_registry is None else flop_registry.get(func.overloadpacket)


def schema_of(function: Any) -> FunctionSchema:
    """Names, types and aliases of what an operation takes and returns."""
    return function._schema  # type: ignore[no-any-return]


def stores(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module holds its parameters and its buffers: setattr is for some things only."""
    return module._parameters, module._buffers


def gradient_hooks(module: nn.Module) -> list[object]:
    """What is to happen when gradients come to the module, or to its parameters."""
    owners = (module, *module.parameters(recurse=False))
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    held = (getattr(owner, name, None) for owner in owners for name in names)
    return [hook for hooks in held if hooks for hook in hooks.values()]


def global_hooks(kind: str) -> list[object]:
    """What runs around every module of this process: `forward_pre`, `forward`, `backward`, ..."""
    return list((find(f"torch.nn.modules.module._global_{kind}_hooks") or {}).values())


def forward_hooks(module: nn.Module) -> tuple[object, ...]:
    """What runs before and after the module's forward."""
    return (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def is_counting_norm(module: nn.Module) -> bool:
    """Whether it is one of torch's norms with running statistics."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def version_of(tensor: torch.Tensor) -> int:
    """How often its memory was written."""
    return tensor._version


def arguments_checked() -> bool:
    """Whether torch.distributions checks what it is given; where it does not say: as at first."""
    return bool(getattr(torch.distributions.Distribution, "_validate_args", __debug__))


def import_dynamo() -> None:
    """What optimizers import at their first step: it takes two seconds."""
    find("torch._dynamo.config")


class OwnOperation(NamedTuple):
    name: str  # bench::sleep, as torch.library.custom_op made it
    function: Callable[..., object]
    schema: FunctionSchema
    has_backward: bool


def own_operations() -> Mapping[str, OwnOperation]:
    """All that there are, by name; none where torch keeps another list: they are refused then."""
    return {
        name: OwnOperation(
            name, made._init_fn, schema_of(made._opoverload), made._backward_fn is not None
        )
        for name, made in (own_definitions or {}).items()
    }
