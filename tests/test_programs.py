"""Random programs, run by real ranks, train as the user's model does in one process.

40 models, 8 programs each: losses, gradients, parameters and buffers of two steps at 1e-10, and
replicas equal bit by bit. What a failure says is a command that runs its program alone.
"""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from programs import draw_program, make_model, remembering, run_program, run_programs

from ppc.errors import PpcError

pytestmark = pytest.mark.dist

MODELS, PROGRAMS = 44, 8
"""Some are refused: 300 are left."""
tally: Counter[str] = Counter()


def check_model(seed, server):
    outcomes = run_programs(seed, range(PROGRAMS), server)
    ran = [outcome for outcome in outcomes if outcome.comparison]
    tally.update(models=1, programs=len(ran), hard=sum(outcome.hard for outcome in ran))
    tally.update({"refused": len(outcomes) - len(ran)})
    wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("seed", range(MODELS))
def test_programs_of_a_random_model(seed, fork_server):
    check_model(seed, fork_server)


def test_enough_programs_ran_and_a_third_are_hard():
    """Three stages or more, a value that skips a stage, or two replicas."""
    if tally["models"] < MODELS:
        pytest.skip("not all models were run by this process")
    print(dict(tally))  # noqa: T201  # how many there were
    assert tally["programs"] >= 300
    assert tally["hard"] >= tally["programs"] / 3


@pytest.mark.slow
def test_two_thousand_programs(fork_server, capsys):
    tally.clear()
    seed = MODELS
    while tally["programs"] < 2000:
        check_model(seed, fork_server)
        seed += 1
        if seed % 10 == 0:
            with capsys.disabled():
                print(f"\n{tally['programs']} of 2000 programs, {tally['hard']} hard", flush=True)  # noqa: T201
    assert tally["hard"] >= tally["programs"] / 3


FAULTS = {
    "a wrong gradient sum": (r"flat, dist\.ReduceOp\.SUM", "flat, dist.ReduceOp.MAX"),
    "a lost microbatch": (
        r"    loss\.backward\(\)",
        "    loss.backward(torch.full_like(loss, mb > 0))",
    ),
    "running statistics counted twice": (
        r"norm\.momentum, norm\.num_batches_tracked = 0\.0, None",
        "pass",
    ),
    "a seed without the microbatch's number": (r"\{step\} \{[^}]*mb[^}]*\}", "{step} 0"),
    "a bucket that is not reduced": (
        r"flat = self\.flat\[len\(self\.works\)\]",
        "flat = self.flat[len(self.works)].clone()",
    ),
    "the gradient of a skip that is dropped": (
        r"(torch\.autograd\.backward\(.*\(grad_\w+_from_\d+, )(grad_\w+_from_\d+\))",
        r"\1 0 * \2",
    ),
}
"""Fault -> what is planted in every script that has the text: (pattern, in its place)."""


class Untouched(Exception):  # noqa: N818  # no error
    """A program that has no place for the fault."""


@cache
def model(seed, folder):
    folder.mkdir(exist_ok=True)
    return make_model(seed, folder)


def planted(fault, folder, server):
    """What the check says of programs that have the fault; "" where it finds nothing."""
    pattern, wrong = FAULTS[fault]

    def spoil(files):
        spoiled = tuple(
            replace(file, text=re.sub(pattern, wrong, file.text))
            if file.path.startswith("rank")
            else file
            for file in files
        )
        if spoiled == files:
            raise Untouched
        return spoiled

    for seed in range(MODELS):
        try:
            here = model(seed, folder / str(seed))
        except PpcError:
            continue
        with remembering(here.graph):
            for number in range(PROGRAMS):
                program = draw_program(here, number)
                if fault == "a lost microbatch" and program.parallel["microbatches"] == 1:
                    continue
                with suppress(Untouched):
                    outcome = run_program(here, program, server, spoil)
                    if outcome.comparison:
                        yield outcome


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, fork_server, models_folder):
    """In most programs that have a place for it: some models do not read what it spoils."""
    outcomes = list(islice(planted(fault, models_folder, fork_server), 3))
    assert len(outcomes) == 3
    assert sum(bool(outcome.wrong) for outcome in outcomes) >= 2
