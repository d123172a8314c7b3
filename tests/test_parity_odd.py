"""Odd models (tests/odd.py) compile, and train as they do in one process."""

import pytest
from jobs import make_spec, prove
from odd import Odd, code_of, groups, joined, more, stands_alone

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

cases = {name: odd for group in groups.values() for name, odd in group.items()}


def spec_of(folder, code, fields, *, pipeline=2, replicas=1, **parallel):
    shapes = {"x": {"shape": [4, 6]}, **{name: more[name] for name in fields}, "y": {"shape": [2]}}
    parallel = {"pipeline": pipeline, "data": replicas, "microbatches": 2} | parallel
    return make_spec(
        folder,
        code,
        model={"coupled": "accept"},  # some follow the mean of what they see
        data={"source": "random", "samples": 10, "fields": shapes},
        train={"global_batch": 6, "steps": 2},
        cluster={"devices_per_node": pipeline * replicas},
        parallel=parallel,
    )


long = ("structure", "parameters", "operations")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow][: name in long]) for name in groups]
)
def test_many_in_one_model(tmp_path, fork_server, name):
    """One after the other, in two stages."""
    some = [odd for odd in groups[name].values() if not stands_alone(odd)]
    fields = dict.fromkeys(field for odd in some for field in odd.fields)
    cuts = [f"cases.{len(some) // 2}"]
    prove(spec_of(tmp_path, joined(some), fields, cuts=cuts), fork_server, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases)
@pytest.mark.parametrize("pipeline", [2, 3])
def test_an_odd_model(tmp_path, fork_server, name, pipeline):
    """What is made before the cut goes over it."""
    odd: Odd = cases[name]
    cuts = {"cuts": ["mid", "last"][: pipeline - 1]}
    spec = spec_of(tmp_path, code_of(odd), odd.fields, pipeline=pipeline, **cuts)
    prove(spec, fork_server, steps=2)


def test_a_stage_that_takes_only_the_number_of_samples(tmp_path, fork_server):
    """A generator draws from noise, and the first stage reads no field for its values."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        made = torch.tanh(self.first(torch.randn(x.shape[0], 4, 6, device=x.device)))
        return self.last(self.mid(made) - x).mean(dim=1)

def build():
    return Net()
"""
    prove(spec_of(tmp_path, code, (), cuts=["mid"]), fork_server, steps=1)
