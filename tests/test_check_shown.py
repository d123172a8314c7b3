"""What a tensor is said to show of another is what it holds, whatever was viewed and copied."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppc.check.listing import Listing
from ppc.check.shown import find, layout_of
from ppc.frontend.capture.private import storage_address

pytestmark = pytest.mark.torch


def elements(shown):
    """The numbers of the elements that are shown, one by one."""
    steps = [step for dim in shown.dims for step in dim]
    places = product(*(range(size) for size, _ in steps))
    return [shown.first + sum(i * s for i, (_, s) in zip(p, steps, strict=True)) for p in places]


def split_first(tensor):
    return tensor.unflatten(0, (2, -1)) if tensor.dim() and tensor.shape[0] % 2 == 0 else tensor


changes = {
    "transpose": lambda t: t.transpose(0, -1),
    "turn": lambda t: t.permute(*range(1, t.dim()), 0),
    "flatten": lambda t: t.flatten(0, 1) if t.dim() > 1 else t,
    "split": split_first,
    "narrow": lambda t: t[len(t) // 3 :],
    "every other": lambda t: t[..., ::2],
    "expand": lambda t: t.unsqueeze(1).expand(t.shape[0], 3, *t.shape[1:]),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
    "cast": lambda t: t.to(torch.float64),
    "diagonal": lambda t: t.diagonal() if t.dim() > 1 else t,
    "windows": lambda t: t.unfold(0, 2, 1) if t.shape[0] > 2 else t,
}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(changes)), max_size=9), st.sampled_from(["rows", "columns"]))
def test_what_is_shown(names, order):
    start = torch.arange(48.0).view(4, 6, 2)
    if order == "columns":
        start = start.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    tensor = start
    with Listing([("a", start)]) as listing:
        for name in names:
            if tensor.numel() < 2000 and tensor.dim():
                tensor = changes[name](tensor)
    content = listing.contents[storage_address(tensor)]
    if content.name in ("a", "float64(a)"):
        shown = find(content.layout, tensor)
        assert shown is None or elements(shown) == tensor.flatten().tolist()
    else:  # a copy of what has no strides
        assert "Layout" in content.name


def test_what_has_no_strides():
    a = torch.arange(12).view(3, 4).t().contiguous()
    assert find(layout_of(a.t()), a.flatten()[1:3]) is not None
    assert find(layout_of(a.t()), a.flatten()[1:5]) is None
    assert find(layout_of(a.t()), a.view(torch.int32)) is None
