"""What the language says of torch.optim, held to the torch that is installed."""

import inspect
import json

import jsonschema
import pytest
import torch
from graphs import Builder, make_spec
from torch import nn
from torch.optim import lr_scheduler

from ppc.analysis.cost import price
from ppc.analysis.memory import measure_memory
from ppc.analysis.moments import copies
from ppc.check.update import real_only, sparse_takers
from ppc.frontend.load import load
from ppc.frontend.optimizers import classes, defaults, left_out
from ppc.frontend.schema import example_of, schema
from ppc.ir.spec import Optimizer, Spec
from ppc.passes.place.assemble import assemble
from ppc.passes.segment import segment
from ppc.run.optimize import make_course

pytestmark = pytest.mark.torch


def torchs(name):
    return getattr(torch.optim, classes[name])


def test_every_class_of_torch_has_an_answer():
    """Each is in the language, or refused: LBFGS needs a closure."""
    found = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert found - {"Optimizer", "LBFGS"} == set(classes.values())
    assert schema()["$defs"]["optimizer_name"]["enum"] == sorted(classes)


@pytest.mark.parametrize("name", classes)
def test_arguments_and_defaults_are_torchs(name):
    signature = inspect.signature(torchs(name)).parameters.values()
    theirs = {p.name: p.default for p in signature if p.name not in left_out}
    assert theirs == defaults(name)


@pytest.mark.parametrize("name", classes)
def test_an_argument_is_a_groups_too(name):
    """Torch takes each of them by group: `defaults` is what a group may have."""
    made = torchs(name)([nn.Parameter(torch.ones(2, 2))])
    assert set(defaults(name)) <= made.defaults.keys() | {"decoupled_weight_decay"}


def values(name, key):
    """The example of an argument, and the ends of its range where they are in it."""
    rules = schema()["$defs"][name]["properties"][key]
    rules = (
        schema()["$defs"][rules["$ref"].rpartition("/")[2]] | rules if "$ref" in rules else rules
    )
    yield example_of(rules)
    yield from (rules[end] for end in ("minimum", "maximum") if end in rules)
    yield from rules.get("enum", ())


@pytest.mark.parametrize("name", classes)
def test_torch_takes_what_the_schema_admits(name):
    for key in defaults(name):
        for value in values(name, key):
            option = tuple(value) if isinstance(value, list) else value
            torchs(name)([nn.Parameter(torch.ones(2, 2))], **tame(name, key, option))


def tame(name, key, option):
    """With what an argument needs beside it."""
    return {key: option} | ({"momentum": 0.9} if (name, key) == ("sgd", "nesterov") else {})


WRONG = {
    "lr": -1, "eps": -1, "weight_decay": -1, "betas": [0.9, 1.0], "rho": 1.5, "d": 0.5,
    "beta2_decay": 0.1, "lr_decay": -1, "initial_accumulator_value": -1, "etas": [0.5, 1.0],
    "alpha": -1, "adjust_lr_fn": "?", "momentum_decay": -1, "momentum": -1,
}  # fmt: skip


@pytest.mark.parametrize("name", classes)
def test_the_schema_refuses_what_torch_does(name):
    """By the ranges; the rules of torch are those of the installed one."""
    draft = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema()["$defs"]})
    for key in defaults(name).keys() & WRONG.keys():
        value = [-1.0, -1.0] if (name, key) == ("adafactor", "eps") else WRONG[key]
        option = tuple(value) if isinstance(value, list) else value
        try:
            torchs(name)([nn.Parameter(torch.ones(2, 2))], **{key: option})
        except ValueError:
            assert not draft.is_valid({"name": name, key: value}), key


def step(name, parameter, gradient, **options):
    parameter.grad = gradient
    optimizer = torchs(name)([parameter], **options)
    for _ in range(2):
        optimizer.step()
    return optimizer.state[parameter]


KEPT = [
    *((name, {}) for name in classes if name != "sparseadam"),
    ("adam", {"amsgrad": True}),
    ("adamw", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"centered": True, "momentum": 0.9}),
    ("sgd", {"momentum": 0.9}),
    ("sparseadam", {}),
]


@pytest.mark.parametrize(("name", "options"), KEPT)
def test_what_a_class_keeps(name, options):
    """Taking real steps: its tensors of more than one element, by the bytes of a parameter."""
    parameter = nn.Parameter(torch.randn(6, 4))
    gradient = torch.randn(6, 4)
    state = step(
        name, parameter, gradient.to_sparse(1) if name == "sparseadam" else gradient, **options
    )
    large = [t for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    b = Builder()
    graph = segment(b.graph(b.linear("a", b.input("x", 4), 4, 6)))
    spec = make_spec(1, optimizer=Optimizer(name=classes[name], options=options))
    (memory,) = measure_memory(graph, assemble(graph, price(graph, spec), spec, (0,)), spec)
    assert memory.optimizer == 4 * sum(t.numel() for t in large)
    if name != "adafactor":
        assert len(large) == copies(classes[name], options)


def test_adafactor_keeps_rows_and_columns():
    """Of more than two dimensions, too; of a vector each element."""
    for shape in ((7,), (6, 4), (5, 3, 2)):
        state = step("adafactor", nn.Parameter(torch.randn(shape)), torch.randn(shape))
        b = Builder()
        x = b.op("mul", b.input("x", *shape), b.parameter("w", *shape))
        graph = segment(b.graph(x))
        spec = make_spec(1, optimizer=Optimizer(name="Adafactor"))
        (memory,) = measure_memory(graph, assemble(graph, price(graph, spec), spec, (0,)), spec)
        kept = sum(t.numel() for key, t in state.items() if key != "step")
        assert memory.optimizer == 4 * kept


def takes(name, parameter, gradient, **options):
    try:
        step(name, parameter, gradient, **options)
    except (RuntimeError, ValueError, ZeroDivisionError):
        return False
    return True


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_which_gradients_a_class_takes():
    def sparse(name, **options):
        return takes(name, nn.Parameter(torch.ones(3, 2)), torch.ones(3, 2).to_sparse(1), **options)

    def complex_one(name, **options):
        ones = torch.ones(3, 2, dtype=torch.complex64)
        return takes(name, nn.Parameter(ones), ones, **options)

    def empty(name):
        return takes(name, nn.Parameter(torch.ones(3, 0)), torch.ones(3, 0))

    dense = set(classes) - {"sparseadam"}
    assert {classes[name] for name in classes if sparse(name)} == sparse_takers
    assert {classes[name] for name in dense if not complex_one(name)} | {"SparseAdam"} == real_only
    assert {name for name in dense if not empty(name)} == {"adafactor", "muon"}
    assert not any(sparse(name, weight_decay=0.1) for name in ("sgd", "adagrad"))
    assert not any(sparse(name, fused=True) for name in ("sgd", "adagrad"))
    assert not complex_one("adamw", fused=True)
    assert sparse("sgd", momentum=0.9, nesterov=True)
    assert not takes("muon", nn.Parameter(torch.ones(3)), torch.ones(3))
    assert takes("muon", nn.Parameter(torch.ones(0, 3)), torch.ones(0, 3))
    assert not takes("sparseadam", nn.Parameter(torch.ones(3, 2)), torch.ones(3, 2))


# ------------------------------------------------------------------- the learning rate by step


@pytest.fixture
def course(tmp_path):
    """The factor on lr, by step, of a training of 12 steps."""

    def course(form, **more) -> list[float]:
        tree = {
            "model": {"factory": "torch.nn:Linear", "args": {"in_features": 4, "out_features": 2}},
            "data": {"source": "random", "samples": 8, "fields": {"input": {"shape": [4]}}},
            "cluster": {"devices_per_node": 1, "device": "cpu"},
            "train": {"steps": 12, "lr_schedule": form, **more},
        }
        (tmp_path / "s.yaml").write_text(json.dumps(tree))
        spec: Spec = load(tmp_path / "s.yaml")
        made = make_course(spec, 12)
        return [made(step) for step in range(12)]

    return course


def by_torch(make) -> list[float]:
    """What a scheduler of torch's makes of a rate of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(12):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(found) < 12 else None
    return found


def warmed(optimizer, after):
    """Three steps of warm-up, then another scheduler."""
    warmup = lr_scheduler.LinearLR(optimizer, 1 / 3, 1.0, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, after], milestones=[3])


@pytest.mark.parametrize("form", [
    {}, {"pct_start": 0.5, "div_factor": 4, "final_div_factor": 10}, {"pct_start": 0.05},
    {"pct_start": 0.0}, {"pct_start": 0.99},
])  # fmt: skip
def test_one_cycle_is_torchs(course, form):
    found = course({"name": "one_cycle", **form})
    options = {"max_lr": 1.0, "total_steps": 12, "cycle_momentum": False, **form}
    assert found == pytest.approx(by_torch(lambda o: lr_scheduler.OneCycleLR(o, **options)))


@pytest.mark.filterwarnings("ignore")  # torch's own schedulers warn of each other
def test_step_is_torchs(course):
    def after(optimizer):
        return lr_scheduler.StepLR(optimizer, 4, gamma=0.5)

    assert course({"name": "step", "every": 4, "gamma": 0.5}) == pytest.approx(by_torch(after))
    found = course({"name": "step", "every": 4, "gamma": 0.5, "warmup": 3})
    assert found == pytest.approx(by_torch(lambda o: warmed(o, after(o))))


def test_a_callable_is_torchs_lambda(course, tmp_path):
    (tmp_path / "rates.py").write_text("def rate(step):\n    return 0.9**step\n")
    found = course("rates.py:rate")
    assert found == by_torch(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step))
    found = course({"name": "rates.py:rate", "warmup": 3})
    assert found == pytest.approx([min(1, (i + 1) / 3) * 0.9**i for i in range(12)])


def test_the_other_courses(course):
    warm = [1 / 4, 2 / 4, 3 / 4, 1]
    assert course({"name": "constant", "warmup": 4}) == [*warm, *[1] * 8]
    roots = [(4 / (i + 1)) ** 0.5 for i in range(4, 12)]
    assert course({"name": "inverse_sqrt", "warmup": 4}) == pytest.approx([*warm, *roots])
    roots = [(i + 1) ** -0.5 for i in range(12)]
    assert course("inverse_sqrt") == pytest.approx(roots)
    assert course("linear") == pytest.approx([1 - i / 12 for i in range(12)])
    assert course({"name": "linear", "warmup": 4, "final": 0.5})[-1] == pytest.approx(1 - 7 / 16)

    def annealed(optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=0.1)

    assert course({"name": "cosine", "final": 0.1}) == pytest.approx(by_torch(annealed))
