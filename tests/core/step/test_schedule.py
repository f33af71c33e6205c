"""Schedules as data: text, checks, transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import ScheduleError
from plait.core.step.clock.pipeline_clock import dry_run, peak_activations
from plait.core.step.schedule import (
    Op,
    Schedule,
    check,
    ends,
    parse_op,
    with_edges,
    with_transfers,
)
from plait.core.step.schedules import (
    GENERATORS,
    Shape,
    forward_only,
    generate,
    parse_schedule,
    planned_shape,
)

EVERY = [(name, ranks, count) for name in GENERATORS for ranks in (1, 2, 3, 4) for count in (1, 2, 4, 5, 9)]


def made(name: str, ranks: int, count: int) -> Schedule:
    return generate(name, planned_shape(name, ranks, count, 3))


@pytest.mark.parametrize(("name", "ranks", "count"), EVERY)
def test_every_schedule_is_whole_reads_back_and_never_deadlocks(name: str, ranks: int, count: int) -> None:
    schedule = made(name, ranks, count)
    check(schedule)
    full = with_transfers(schedule)
    assert parse_schedule(str(full)) == full
    assert [tuple(op for op in ops if op.computes) for ops in full.ranks] == list(schedule.ranks)
    for mode in ("buffered", "rendezvous"):
        assert sum(p.op.computes for p in dry_run(full, transfers=mode).placed) == sum(map(len, schedule.ranks))


@pytest.mark.parametrize(("name", "ranks", "count"), EVERY)
def test_the_first_micro_batches_alone_run(name: str, ranks: int, count: int) -> None:
    whole = with_transfers(made(name, ranks, count))
    for fewer in range(1, count + 1):
        schedule = whole.first(fewer)
        check(schedule)
        assert schedule.num_micro_batches == fewer and schedule.edges == whole.edges
        dry_run(schedule, transfers="rendezvous")
        alive, before = peak_activations(schedule), peak_activations(whole)
        assert all(alive[stage] <= before[stage] for stage in alive)
        if name in ("gpipe", "1f1b"):
            assert [tuple(op for op in ops if op.computes) for ops in schedule.ranks] == list(
                made(name, ranks, fewer).ranks
            )


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 5), st.integers(1, 12), st.integers(0, 4), st.data())
def test_any_skips_and_any_look_ahead_run(name: str, ranks: int, count: int, ahead: int, data: st.DataObject) -> None:
    schedule = made(name, ranks, count)
    stages = range(schedule.num_stages)
    pairs = [(a, b) for a in stages for b in stages if a < b - 1]
    skips = data.draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    schedule = with_transfers(with_edges(schedule, [*schedule.edges, *skips]), ahead)
    dry_run(schedule, transfers="rendezvous")
    assert parse_schedule(str(schedule)) == schedule
    crossing = [edge for edge in schedule.edges if schedule.rank_of[edge[0]] != schedule.rank_of[edge[1]]]
    moves = [op for ops in schedule.ranks for op in ops if not op.computes]
    assert len(moves) == 4 * count * len(crossing)  # a send and a receive, forward and backward


def test_receives_stand_in_the_senders_order_and_ahead_of_their_reader() -> None:
    text = str(with_transfers(generate("1f1b", Shape(ranks=2, micro_batches=3)), ahead=1))
    assert text.splitlines() == [
        "# 1f1b",
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_text_is_that_of_torch() -> None:
    from torch.distributed.pipelining.schedules import _Action

    for word in ("2F0", "13B7", "0I1", "1W12", "1SEND_F3", "2RECV_F3", "2SEND_B3", "1RECV_B3"):
        theirs = _Action.from_str(word)
        ours = parse_op(word)
        assert theirs is not None
        assert str(theirs) == str(ours) == word
        assert (theirs.stage_index, theirs.microbatch_index) == (ours.stage, ours.micro_batch)


@given(st.builds(Op, st.integers(0, 99), st.sampled_from("FBIW"), st.integers(0, 999), st.just(-1)))
def test_computations_read_back(op: Op) -> None:
    assert parse_op(str(op)) == op


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from("FB"), st.integers(0, 99))
def test_transfers_read_back(source: int, target: int, direction: str, at: int) -> None:
    if source != target:
        for kind, stage, peer in ((f"SEND_{direction}", source, target), (f"RECV_{direction}", target, source)):
            op = Op(stage, kind, at, peer)  # type: ignore[arg-type]
            assert parse_op(str(op)) == op
            assert op in ends(op.transfer)


@pytest.mark.parametrize("word", ["", "F0", "2X0", "2F", "0SEND_B1", "0RECV_F1", "1F2>3", "1SEND_F2<3", "2F0 ", "-1F0"])
def test_what_is_no_op_is_refused_by_name(word: str) -> None:
    with pytest.raises(ScheduleError, match="is not a schedule op"):
        parse_op(word)


def by_hand(*ranks: str) -> str:
    return "\n".join(f"rank {number}: {ops}" for number, ops in enumerate(ranks))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no op"),
        ("rank 1: 0F0", "line 1 .* neither"),
        ("edges: 0-1\nrank 0: 0F0 0B0", "'0-1' is not an edge"),
        ("edges: 0>1 0>1\n" + by_hand("0F0 0B0", "1F0 1B0"), "edge 0>1 is listed twice"),
        ("edges: 1>0\n" + by_hand("0F0 0B0", "1F0 1B0"), "edge 1>0"),
        (by_hand("0F0 0B0 0F0"), "0F0 occurs twice"),
        (by_hand("0F0", "0B0"), "0B0 is listed on rank 1, but other ops of stage 0 on rank 0"),
        (by_hand("0F0 0F1 0B1"), "0B0 never runs"),
        (by_hand("0F0 0I0"), "0W0 never runs"),
        (by_hand("0B0 0F0"), "0B0 before 0F0"),
        (by_hand("0F0 0B0 0W0"), "0W0 does not belong .* not split"),
        (by_hand("0F0 1B0 1F0 0B0"), "1B0 before 1F0"),
        (by_hand("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"), "1F0 before 1RECV_F0"),
        (by_hand("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), "1SEND_B0 is missing"),
        (by_hand("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1SEND_B0 1F0 1B0"), "1SEND_B0 before 1B0"),
        (
            by_hand("0F0 0SEND_F0>2 0B0", "1F0 1B0", "2F0 2B0"),
            "0RECV_B0 is missing: stages 1 and 0 lie on different ranks",
        ),
    ],
)
def test_a_wrong_schedule_is_refused_by_op(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        parse_schedule(text)


def test_a_deadlock_names_the_circle() -> None:
    schedule = parse_schedule(by_hand("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    with pytest.raises(
        ScheduleError,
        match=r"deadlock: rank 0 waits at 0B0 for 1SEND_B0 of rank 1; rank 1 waits at 1F1 for 0SEND_F1 of rank 0",
    ):
        dry_run(schedule)


def test_blocking_sends_deadlock_where_both_sides_send() -> None:
    schedule = with_transfers(generate("1f1b", Shape(ranks=2, micro_batches=4)))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 waits at 0.* of rank 1; rank 1 waits at 1.* of rank 0"):
        dry_run(schedule, transfers="blocking")
    dry_run(with_transfers(generate("gpipe", Shape(ranks=2, micro_batches=4)), ahead=0), transfers="blocking")


def test_two_orders_of_one_channel_are_refused() -> None:
    schedule = with_transfers(generate("gpipe", Shape(ranks=2, micro_batches=2)))
    first, second = parse_op("1RECV_F0"), parse_op("1RECV_F1")
    swapped = [{first: second, second: first}.get(op, op) for op in schedule.ranks[1]]
    with pytest.raises(ScheduleError, match="rank 0 sends 0SEND_F0 where rank 1 expects 1RECV_F1"):
        dry_run(replace(schedule, ranks=(schedule.ranks[0], tuple(swapped))))


def test_a_schedule_that_is_not_checked_gets_no_transfers() -> None:
    schedule = Schedule("by hand", 1, ((Op(0, "B", 0), Op(0, "F", 0)),))
    with pytest.raises(ScheduleError, match="0B0 before 0F0"):
        with_transfers(schedule)
    assert with_transfers(schedule, proven=True) == schedule


def test_one_op_that_is_the_whole_model_is_of_one_stage() -> None:
    assert parse_schedule("rank 0: 0S0 0S1").whole
    with pytest.raises(ScheduleError, match="needs one stage; this schedule has 2"):
        parse_schedule(by_hand("0S0", "1S0"))
    with pytest.raises(ScheduleError, match="0S0 never runs"):
        check(Schedule("by hand", 1, ((Op(0, "S", 1),),)))


def test_a_stage_or_a_micro_batch_of_which_nothing_runs_is_named() -> None:
    for text, says in (
        ("rank 0: 1F0 1B0", "0B0 never runs"),
        ("rank 0: 0F1 0B1", "0B0 never runs"),
        ("rank 0: 0F0 0B0 2F0 2B0", "1B0 never runs"),
        ("rank 0: 0F0 0B0 3F3 3B3", "0F1 never runs"),
        ("rank 0: 0F0 0B5", "0B5 has a stage or micro-batch number of 2 or more"),
        ("rank 0: 0F0 0B2", "0B2 has a stage or micro-batch number of 2 or more"),
        ("rank 0: 2F0 0B0", "2F0 has a stage or micro-batch number of 2 or more"),
        ("rank 0: 0F0 0F9999999 0B0", "0F9999999 has a stage or micro-batch number of 3 or more"),
    ):
        with pytest.raises(ScheduleError, match=says):
            parse_schedule(text)


def test_transfers_between_stages_of_one_rank_have_no_place() -> None:
    with pytest.raises(
        ScheduleError, match=r"0SEND_F0 does not belong .* no tensor crosses ranks from stage 0 to stage 1"
    ):
        parse_schedule("rank 0: 0F0 0SEND_F0 1F0 1B0 0B0")
    with pytest.raises(ScheduleError, match=r"0F0 does not belong .* S is already forward and backward in one"):
        parse_schedule("rank 0: 0S0 0F0")
    with pytest.raises(ScheduleError, match=r"0B0 does not belong .* its backward is split into I and W"):
        parse_schedule("rank 0: 0F0 0I0 0W0 0B0")


def test_a_schedule_without_ops_has_no_micro_batches() -> None:
    empty = Schedule("by hand", 1, ((),))
    assert (empty.num_micro_batches, empty.rank_of, empty.whole, empty.stages_of(0)) == (0, {}, False, ())
    assert with_transfers(Schedule("by hand", 1, ((Op(0, "F", 0),),), trains=False)).num_micro_batches == 1


def test_the_text_tells_what_a_chain_does_not() -> None:
    skips = with_edges(generate("gpipe", Shape(ranks=3, micro_batches=1)), [(0, 1), (1, 2), (0, 2)])
    assert str(skips).splitlines()[:2] == ["# gpipe", "edges: 0>1 0>2 1>2"]
    assert str(forward_only(skips, 1)).splitlines()[1] == "forward only:"
    assert (skips.consumers, skips.producers) == ({0: [1, 2], 1: [2], 2: []}, {0: [], 1: [0], 2: [0, 1]})


def test_an_op_says_what_it_is() -> None:
    for word, computes, forward, sends, site in (
        ("2F0", True, True, False, "stage"), ("2B1", True, False, False, "stage"),
        ("2I1", True, False, False, "stage"), ("0S1", True, False, False, "stage"),
        ("1SEND_F3", False, True, True, "transfer"), ("1RECV_F3", False, True, False, "transfer"),
        ("1SEND_B3", False, False, True, "transfer"),
    ):  # fmt: skip
        op = parse_op(word)
        assert (op.computes, op.forward, op.sends, op.site) == (computes, forward, sends, site)
        assert (op.layer, op.slice) == (op.stage, op.micro_batch)


def test_an_evaluation_goes_through_a_ranks_stages_one_after_the_other() -> None:
    text = str(forward_only(generate("interleaved", Shape(ranks=2, micro_batches=2, chunks=2)), 2))
    assert text.splitlines()[2] == ("rank 0: 2RECV_F0 0F0 0SEND_F0 2RECV_F1 0F1 0SEND_F1 2F0 2SEND_F0 2F1 2SEND_F1")


@pytest.mark.parametrize(("ahead", "receives"), [(0, [3, 4]), (1, [2, 3]), (2, [1, 2]), (9, [0, 0])])
def test_receives_are_posted_so_far_ahead(ahead: int, receives: list[int]) -> None:
    """By how many computations stand before each: gradients are read by the fourth and the
    fifth."""
    schedule = Schedule("by hand", 2, (
        tuple(map(parse_op, ("0F0", "0F1", "0F2", "0B0", "0B1", "0B2"))),
        tuple(map(parse_op, ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"))),
    ))  # fmt: skip
    ops = with_transfers(schedule, ahead).ranks[0]
    before = [sum(each.computes for each in ops[:at]) for at, op in enumerate(ops) if op.kind == "RECV_B"]
    assert before[:2] == receives


def test_a_receive_that_is_overtaken_is_posted_with_the_one_that_overtook_it() -> None:
    """Rank 0 sends 1 before 0, and rank 1 reads 0 first."""
    schedule = Schedule("by hand", 2, (
        tuple(map(parse_op, ("0F1", "0F0", "0B0", "0B1"))), tuple(map(parse_op, ("1F0", "1F1", "1B1", "1B0")))
    ))  # fmt: skip
    assert " ".join(map(str, with_transfers(schedule, 0).ranks[1][:4])) == "1RECV_F1 1RECV_F0 1F0 1F1"
