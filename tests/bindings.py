"""What a captured model is given, for tests of where models and data come from."""

from jobs import make_spec

from ppc.check.capture import compare_numbers
from ppc.frontend.capture.build import default_dtype
from ppc.frontend.capture.capture import capture


def bound(folder, code, **sections):
    """What the model's call is given, and which fields feed the graph; it computes the model."""
    spec = make_spec(folder, code, **sections)
    graph = capture(spec)
    with default_dtype(spec.train.precision):
        assert list(compare_numbers(spec, graph, (2, 2))) == []
    arguments = {name: str(value) for name, value in graph.calls["", 0].arguments}
    return arguments, {i.field: str(i.meta) for i in graph.inputs}


def random_data(**shapes):
    fields = {name: {"shape": list(shape)} for name, shape in shapes.items()}
    return {"source": "random", "samples": 9, "fields": fields}
