"""Torch's private names are used in one file, and what stands in for each does what it does."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from inits import Init, distance
from jobs import make_spec
from nets import net
from test_registered import job
from torch import nn
from torch.distributions import Distribution, Normal
from torch.fx.experimental import proxy_tensor

from ppc.errors import CaptureError
from ppc.frontend.capture import autocast, private
from ppc.frontend.capture.capture import capture
from ppc.frontend.capture.distributions import unchecked
from ppc.frontend.capture.private import fake_mode, storage_address
from ppc.pipeline import compile

pytestmark = pytest.mark.torch

root = Path(__file__).parents[1]
PLAIN = ("self", "cls", "os", "functools", "torch.ops.")  # one's own; Python's; names of operations
files = [*sorted((root / "compiler").rglob("*.py")), *sorted((root / "generated").rglob("*.py"))]


def private_names(source):
    """Names with an underscore that a text takes from others: imported, or read off an object."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not ast.unparse(node.value).startswith(PLAIN):
            names = [node.attr]
        found += [n for n in names if n.startswith("_") and not n.endswith("__")]
    return found


def test_private_names_stay_in_one_file():
    found = {path for path in files if private_names(path.read_text())}
    assert [path.name for path in found] == ["private.py"]
    assert len(files) > 100


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.init import _no_grad_fill_",
        "torch._C.DispatchKeySet()",
        "func._schema.arguments",
    ],
)
def test_a_private_name_is_found(line):
    assert private_names(line)


@pytest.fixture
def nothing_found(monkeypatch):
    """No private name that is looked up when it is needed is there."""
    monkeypatch.setattr(private, "find", lambda _: None)


class WithoutAddress:
    """A storage that does not say where it is."""

    def __init__(self, storage):
        self.storage = storage

    def __getattr__(self, name):
        if name == "_cdata":
            raise AttributeError(name)
        return getattr(self.storage, name)


def test_storages_are_told_apart(monkeypatch):
    with fake_mode():
        fake = torch.ones(3)
    tensors = [torch.ones(4), torch.ones(4), fake]
    tensors.append(tensors[0][1:])
    addresses = [storage_address(tensor) for tensor in tensors]
    hidden = [WithoutAddress(tensor.untyped_storage()) for tensor in tensors]
    for tensor, storage in zip(tensors, hidden, strict=True):
        monkeypatch.setattr(tensor, "untyped_storage", lambda storage=storage: storage)
    assert [storage_address(tensor) for tensor in tensors] == addresses
    assert [addresses.index(address) for address in addresses] == [0, 1, 2, 0]


def test_real_numbers_inside_of_a_mode(monkeypatch):
    monkeypatch.setattr(private, "disable_modes", None)
    three = torch.full((2,), 3.0)
    with fake_mode():
        with private.no_modes():
            assert three.sum().item() == 6
            assert not private.is_fake(torch.ones(2))
        assert private.is_fake(torch.ones(2))


def test_trunc_normal_by_its_own_name(tmp_path, monkeypatch):
    inner = nn.init._no_grad_trunc_normal_

    def own(tensor, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None):
        return inner(tensor, mean, std, a, b, generator=generator)

    monkeypatch.delattr(nn.init, "_no_grad_trunc_normal_")
    monkeypatch.setattr(nn.init, "trunc_normal_", own)
    code = "w = torch.empty(64, 64); nn.init.trunc_normal_(w, std=0.7); self.w = nn.Parameter(w)"
    init = Init(tmp_path, code)
    assert init.targets("w")[-1] == "trunc_normal_"
    assert distance(init.drawn("w"), init.real["w"]) < 0.05
    assert nn.init.trunc_normal_ is own


def test_masks_are_left_to_a_torch_that_does_not_look(monkeypatch):
    monkeypatch.delattr(nn.modules.transformer, "_detect_is_causal_mask")
    with private.masks_unread():
        assert not hasattr(nn.modules.transformer, "_detect_is_causal_mask")


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    def backward(_, grad):
        return 2 * grad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=2):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("below", [True, False])
def test_autograd_functions_are_met(monkeypatch, below):
    """Those that are bound to a name, too; and not where torch or another one applies them."""
    monkeypatch.setattr(torch.autograd.Function, "apply", vars(torch.autograd.Function)["apply"])
    if not below:
        monkeypatch.setattr(private, "find", lambda _: None)
        private.watch_functions.__wrapped__()
    private.watch_functions()
    bound, met = Twice.apply, []

    def take(cls, plain, args):
        met.append(cls)
        return plain(*args)

    x = torch.ones(1, requires_grad=True)
    with private.on_autograd_function(take):
        bound(x).backward()
    assert (x.grad.item(), met) == (2, [Twice])
    bound(x)
    assert (met, private.takers) == ([Twice], [])
    with private.on_autograd_function(lambda *given: given[2]):
        assert Scaled.apply(factor=3, x=x) == Scaled.apply(x, 3) == (x, 3)
        assert Scaled.apply(x) == (x, 2)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_are_met(monkeypatch, known, use_reentrant):
    module = torch.utils.checkpoint
    if not known:
        monkeypatch.delattr(module, "CheckpointFunction")
    entered, before = [], module.checkpoint

    def around():
        entered.append(1)
        return torch.no_grad()

    with private.checkpoints_plain(around):
        x = torch.ones(1, requires_grad=True)
        args = {} if use_reentrant else {"alpha": 3, "early_stop": False}
        y = module.checkpoint(torch.add, x, x, use_reentrant=use_reentrant, **args)
    assert (y.item(), y.requires_grad, entered) == (2 if use_reentrant else 4, False, [1])
    assert module.checkpoint is before


@pytest.mark.usefixtures("nothing_found")
def test_regions_that_do_not_stay_flat_are_refused(tmp_path):
    code = net("with torch.no_grad():\n    h = self.a(x)\nreturn self.b(self.a(x) + h)")
    with pytest.raises(CaptureError, match="wrap_with_set_grad_enabled has no form in a script"):
        capture(make_spec(tmp_path, code))


@pytest.mark.parametrize("said", [True, False])
def test_distributions_check_again(monkeypatch, said):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile leaves it False
    if not said:
        monkeypatch.delattr(Distribution, "_validate_args")
    with unchecked():
        Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, -1.0)


@pytest.mark.usefixtures("nothing_found")
def test_autocasts_lists_are_read_off_other_names():
    assert len(autocast.autocast_differences()) > 5
    assert autocast.autocast_differences.__wrapped__() == autocast.autocast_differences()


def test_flops_are_counted_without_formulas(monkeypatch):
    product, image = torch.ops.aten.mm.default, torch.ops.aten.convolution.default
    a, b, x, w = torch.ones(2, 3), torch.ones(3, 5), torch.ones(1, 2, 8, 8), torch.ones(4, 2, 3, 3)
    calls = [(product, (a, b)), (image, (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))]
    calls.append((torch.ops.aten.add.Tensor, (a, a)))

    def count():
        for function, args in calls:
            formula = private.flop_formula(function)
            yield formula(*args, out_val=function(*args)) if formula else 0

    expected = list(count())
    assert expected == [60, 5184, 0]
    monkeypatch.setattr(private, "flop_registry", None)
    assert list(count()) == expected


def test_operations_of_ones_own_are_refused_where_they_are_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "own_definitions", None)
    with pytest.raises(CaptureError, match=r"is an operation of ppc_tests's own"):
        compile(job(tmp_path))


def test_a_torch_without_what_nothing_stands_in_for(monkeypatch):
    monkeypatch.delattr(proxy_tensor, "get_proxy_slot")
    name = "ppc.frontend.capture.private_again"
    spec = importlib.util.spec_from_file_location(name, private.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(CaptureError) as caught:
        spec.loader.exec_module(module)
    assert caught.value.message == (
        f"torch {torch.__version__} is not as ppc knows it: cannot import name 'get_proxy_slot' "
        "from 'torch.fx.experimental.proxy_tensor'"
    )
    assert caught.value.hint == "a torch that ppc is tested with, 2.13 to 2.15"


@pytest.mark.usefixtures("nothing_found")
def test_graphs_are_compiled_by_a_torch_without_lazy_ones():
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2)).graph
    with private.uncompiled():
        assert "self" in torch.fx.GraphModule(nn.Linear(2, 2), graph).code


def test_graphs_wait_with_their_text():
    module = torch.fx._lazy_graph_module
    with private.uncompiled():
        made = module._make_graph_module(nn.Linear(2, 2), torch.fx.Graph())
    assert isinstance(made, module._LazyGraphModule)
    assert type(module._make_graph_module(nn.Linear(2, 2), torch.fx.Graph())) is not type(made)
