"""The text of small models, for specs that tests/jobs.py writes."""

from textwrap import indent

frame = """
{before}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.b = nn.Linear(8, 1)
{init}

    def forward(self, {args}):
{forward}

def build():
    return Net()
"""


def net(
    forward: str = "return self.b(self.a(x))", init: str = "", args: str = "x", before: str = ""
) -> str:
    """A model with layers `a` and `b`, 5 to 8 to 1 features, and what else `init` makes."""
    return frame.format(
        before=before,
        init=indent(init.strip("\n"), 8 * " "),
        args=args,
        forward=indent(forward.strip("\n"), 8 * " "),
    )
