"""Models that differ in how they start, for tests of what records it."""

import torch
from jobs import make_spec
from nets import net

from ppc.frontend.capture.build import build_fake, build_model, state_tensors
from ppc.frontend.capture.replay import replay


class Init:
    """The tensors of a model, as recorded and as its factory really makes them."""

    def __init__(self, folder, init, **sections):
        self.spec = make_spec(folder, net(init=init), **sections)
        self.built = build_fake(self.spec)
        self.recipes = self.built.recipes
        self.real = dict(state_tensors(build_model(self.spec)))

    def drawn(self, name, seed=0):
        tensor = self.real[name]
        return replay(self.recipes[name], tuple(tensor.shape), tensor.dtype, seed)

    def targets(self, name):
        return [op.target.split(".")[1] for op in self.recipes[name].ops]


def distance(a, b):
    """Kolmogorov's: the largest distance of the two distributions of values."""
    a, b = a.double().flatten().sort().values, b.double().flatten().sort().values
    at = torch.cat([a, b])
    below = [torch.searchsorted(x, at, right=True) / len(x) for x in (a, b)]
    return float((below[0] - below[1]).abs().max())
