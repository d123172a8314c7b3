"""The stacks that an export notes for its operations, with no more than what is read of them."""

import inspect
import traceback
from contextlib import AbstractContextManager

from torch.fx import proxy

from .patched import patched


class Frames:
    """The running forwards, outermost first, without the text of their lines. It stands in for
    torch's CapturedTraceback, which looks up and words every frame: torch then leaves out all but
    those of forwards, and of a large model's compilation a tenth went there."""

    @staticmethod
    def extract() -> "Frames":
        return Frames()

    def summary(self) -> traceback.StackSummary:
        found, frame = [], inspect.currentframe()
        while frame := frame and frame.f_back:
            if frame.f_code.co_name == "forward":
                line = (frame.f_code.co_filename, frame.f_lineno, "forward")
                found.append(traceback.FrameSummary(*line, lookup_line=False, line=""))
        return traceback.StackSummary.from_list(found[::-1])


def forwards_alone() -> AbstractContextManager[None]:
    """As long as this lasts; where torch has another name for it, stacks stay as they are."""
    name = "CapturedTraceback"
    return patched(proxy, **{name: Frames} if hasattr(proxy, name) else {})
