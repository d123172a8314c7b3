"""Schedules as text."""

from strategies import make_pipeline

from ppc.analysis.diagram import grid, timing_diagram
from ppc.ir.schedule import Row, Schedule, parse_action


def test_timing_of_1f1b():
    assert timing_diagram(make_pipeline(2, 4).order("1f1b")) == (
        "rank 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3 |",
        "rank 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 .. |",
    )


def test_timing_of_gpipe_with_fewer_microbatches_than_stages():
    assert timing_diagram(make_pipeline(3, 1).order("gpipe")) == (
        "rank 0 | F0 .. .. .. .. B0 |",
        "rank 1 | .. F0 .. .. B0 .. |",
        "rank 2 | .. .. F0 B0 .. .. |",
    )


def test_labels_of_unequal_width_stay_in_their_columns():
    first, second = timing_diagram(make_pipeline(2, 11).order("1f1b"))
    assert first.index("F10") == second.index("B9")
    assert len(first) == len(second)


def test_the_middle_is_left_out_where_lines_are_too_long():
    assert timing_diagram(make_pipeline(2, 8).order("1f1b"), width=40) == (
        "rank 0 | F0 F1 .. B0 ... F7 B6 .. B7 |",
        "rank 1 | .. F0 B0 F1 ... B6 F7 B7 .. |",
    )
    odd = timing_diagram(make_pipeline(2, 8).order("1f1b"), width=43)
    assert odd[0] == "rank 0 | F0 F1 .. B0 F2 ... F7 B6 .. B7 |"
    for microbatches in (12, 100, 1000):
        for stages in (1, 2, 12):
            lines = timing_diagram(make_pipeline(stages, microbatches).order("1f1b"))
            assert len({len(line) for line in lines}) == 1
            assert 85 < len(lines[0]) <= 100 or microbatches * stages < 20


def test_ranks_of_two_digits_are_aligned():
    lines = timing_diagram(make_pipeline(11, 1).order("1f1b"))
    assert lines[9].startswith("rank  9 | .. ")
    assert lines[10].startswith("rank 10 | .. ")


def test_actions_of_several_stages_on_a_rank_are_told_apart():
    rows = [["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]]
    schedule = Schedule(
        "printed",
        1,
        tuple(Row(r, (), tuple(map(parse_action, row)), ()) for r, row in enumerate(rows)),
    )
    assert timing_diagram(schedule) == (
        "rank 0 | 0F0 ..  2F0 2B0 ..  0B0 |",
        "rank 1 | ..  1F0 ..  ..  1B0 ..  |",
    )


def test_grid_points_at_a_slot():
    schedule = make_pipeline(2, 2).order("1f1b")
    assert grid(schedule, rank=0, slot=2) == (
        "  rank   0 | 0F0 0F1 0B0 0B1\n                     ^\n  rank   1 | 1F0 1B0 1F1 1B1"
    )


def test_grid_of_a_large_schedule_shows_what_is_around_the_slot():
    text = grid(make_pipeline(16, 64).order("1f1b"), rank=8, slot=100)
    lines = text.splitlines()
    assert [line.split()[1] for line in lines if "|" in line] == [str(r) for r in range(5, 12)]
    assert max(map(len, lines)) <= 100
    arrow = next(i for i, line in enumerate(lines) if line.strip() == "^")
    pointed = make_pipeline(16, 64).order("1f1b").rows[8].actions[100]
    assert lines[arrow - 1][lines[arrow].index("^") :].startswith(str(pointed))
