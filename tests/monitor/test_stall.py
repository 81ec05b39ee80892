"""The diagnosis of stalls, on evidence that was recorded in real runs with real faults."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from surefoot.diagnostics.fault_injection import FAULTS
from surefoot.diagnostics.monitor import evidence_server
from surefoot.diagnostics.monitor.evidence import RankEvidence, StallEvidence, read_evidence, write_evidence
from surefoot.diagnostics.monitor.flight_recorder import MEANINGS, read_flight
from surefoot.diagnostics.rules.stall import find_stall
from surefoot.findings import Finding

RECORDINGS = Path(__file__).with_name("recordings")
NAMED = {path.stem: path for path in sorted(RECORDINGS.glob("*.json"))}


def alter(evidence: StallEvidence, **changes: object) -> StallEvidence:
    """The same with some values of all its ranks changed."""
    return replace(evidence, ranks=tuple(replace(rank, **changes) for rank in evidence.ranks))


@pytest.mark.parametrize("kind", NAMED)
def test_recorded_evidence_names_the_cause(kind: str) -> None:
    """`sleeping.three` is of three ranks: one sends what two others wait for from each other."""
    assert find_stall(read_evidence(NAMED[kind])).code == FAULTS[kind.partition(".")[0]].code


def test_of_three_ranks_the_one_that_has_not_come_is_named_also_where_it_says_nothing() -> None:
    evidence = read_evidence(NAMED["sleeping.three"])
    assert find_stall(evidence).evidence["rank"] == 1
    mute = tuple(replace(rank, flight=None, answered=False) if rank.rank == 1 else rank for rank in evidence.ranks)
    assert (find_stall(replace(evidence, ranks=mute)).code, mute[1].rank) == ("SF109", 1)


def test_a_rank_that_waits_for_the_driver_of_its_gpu() -> None:
    """The question does not return. A wait for kernels is none: then the rank is only behind."""
    evidence = read_evidence(NAMED["sleeping"])
    behind = find_stall(evidence).evidence["rank"]

    def with_frame(function: str) -> StallEvidence:
        frame = f'  File "/env/lib/python3.12/site-packages/torch/cuda/__init__.py", line 417 in {function}\n'
        ranks = [
            replace(rank, stacks=re.sub(r"(most recent call first\):\n)", rf"\1{frame}", rank.stacks))
            if rank.rank == behind
            else rank
            for rank in evidence.ranks
        ]
        return replace(evidence, ranks=tuple(ranks))

    finding = find_stall(with_frame("_lazy_init"))
    assert (finding.code, finding.evidence["rank"]) == ("SF114", behind)
    assert "_lazy_init" in finding.cause
    assert find_stall(with_frame("synchronize")).code == "SF106"


def test_of_one_rank_no_others_are_said_to_wait() -> None:
    evidence = read_evidence(NAMED["sleeping"])
    behind = next(rank for rank in evidence.ranks if rank.rank == find_stall(evidence).evidence["rank"])
    alone = find_stall(replace(evidence, ranks=(replace(behind, rank=0),), num_ranks=1))
    assert alone.code == "SF106"
    assert "other ranks" not in alone.fix
    assert "other ranks" in find_stall(evidence).fix


def test_what_is_missing_is_named_where_the_cause_is_not() -> None:
    silent = alter(
        read_evidence(NAMED["sleeping"]), flight=None, answered=False, stacks="", phase="forward", cpu_share=0.0
    )
    finding = find_stall(replace(silent, num_ranks=4))
    assert finding.code == "SF110"
    assert finding.confidence < 0.5
    missing = dict(one.split(": ") for one in finding.evidence["missing"].split("; "))
    assert list(missing) == ["rank 0", "rank 1", "2 ranks on other machines"]
    assert len(missing["rank 0"].split(", ")) == 3, "stacks, a witness's answer, a flight record"
    assert finding.evidence["missing"] in finding.fix


def test_a_rank_that_is_gone_comes_before_whoever_waits_for_it() -> None:
    evidence = read_evidence(NAMED["sleeping"])
    gone = replace(evidence, ranks=(evidence.ranks[0], replace(evidence.ranks[1], state="gone")), oom_kills=0)
    assert (find_stall(gone).code, find_stall(gone).evidence["rank"]) == ("SF101", 1)
    assert find_stall(replace(gone, oom_kills=1)).code == "SF201"
    assert "unknown" in find_stall(replace(gone, oom_kills=None)).cause
    ended = replace(gone, ranks=(gone.ranks[0], replace(gone.ranks[1], has_ended=True)))
    assert find_stall(ended).code != "SF101"


def test_a_collective_in_which_all_are_is_the_network() -> None:
    evidence = read_evidence(NAMED["sleeping"])
    inside = next(rank for rank in evidence.ranks if rank.flight and read_flight(rank.flight).waiting)  # type: ignore[union-attr]
    both = replace(evidence, ranks=(replace(inside, rank=0), replace(inside, rank=1)))
    finding = find_stall(both)
    assert finding.code == "SF108"
    assert "broadcast" in finding.cause
    elsewhere = find_stall(replace(both, num_ranks=4))  # whether the others came is not known
    assert elsewhere.code == "SF110"


def test_an_all_to_all_whose_sizes_do_not_agree_is_no_matter_of_the_network() -> None:
    """Rank 0 sends 14 rows of 8 where rank 1 waits for 15."""
    evidence = read_evidence(NAMED["sleeping"])
    entry = {
        "collective_seq_id": 1, "profiling_name": "nccl:all_to_all", "input_dtypes": ["Float"], "is_p2p": False,
        "process_group": ["0", "default_pg"], "retired": False,
    }  # fmt: skip

    def told(*sizes: tuple[int, int]) -> Finding:
        flights = [
            {"entries": [{**entry, "input_sizes": [[sent, 8]], "output_sizes": [[awaited, 8]]}]}
            for sent, awaited in sizes
        ]
        ranks = tuple(replace(evidence.ranks[0], rank=number, flight=flight) for number, flight in enumerate(flights))
        return find_stall(replace(evidence, ranks=ranks))

    finding = told((14, 15), (15, 15))
    assert finding.code == "SF104"
    assert re.search(r": 232 .* 240 .*\(rank 0 .* 112 .* 120, rank 1 .* 120 .* 120\)$", finding.cause)
    assert told((14, 15), (15, 14)).code == "SF108"


@pytest.mark.parametrize(
    ("started", "code", "rank"), [((1, 1), "SF108", None), ((1, 0), "SF106", 1), ((0, 0), "SF106", 0)]
)
def test_a_kernel_before_a_collective_is_no_matter_of_the_network(
    started: tuple[int, int], code: str, rank: int | None
) -> None:
    """NCCL's records say whether a GPU has come to a collective; those of gloo beside them do not."""
    evidence = read_evidence(NAMED["sleeping"])

    def entry(number: int, *, is_done: bool, starts_ns: int, backend: str = "nccl") -> dict[str, object]:
        return {
            "collective_seq_id": number, "profiling_name": f"{backend}:all_reduce", "input_dtypes": ["Float"],
            "is_p2p": False, "process_group": [backend, "default_pg"], "retired": is_done, "input_sizes": [[8]],
            "output_sizes": [[8]], "time_discovered_started_ns": starts_ns,
        }  # fmt: skip

    def flight(starts_ns: int) -> dict[str, object]:
        done = entry(1, is_done=True, starts_ns=5)
        gloo = entry(1, is_done=True, starts_ns=0, backend="gloo")
        return {"entries": [gloo, done, entry(2, is_done=False, starts_ns=starts_ns)]}

    ranks = tuple(
        replace(evidence.ranks[0], rank=number, flight=flight(starts_ns)) for number, starts_ns in enumerate(started)
    )
    finding = find_stall(replace(evidence, ranks=ranks))
    assert (finding.code, finding.evidence.get("rank")) == (code, rank)


def test_waiting_for_a_disk_is_told_from_being_stopped() -> None:
    evidence = read_evidence(NAMED["sleeping"])
    assert find_stall(alter(evidence, state="disk-sleep")).code == "SF103"
    assert find_stall(alter(evidence, state="stopped")).code == "SF102"


def test_one_rank_alone_says_at_which_line_it_stands() -> None:
    alone = replace(
        next(r for r in read_evidence(NAMED["sleeping"]).ranks if "_sleep" in r.stacks), rank=0, flight=None
    )
    evidence = replace(read_evidence(NAMED["sleeping"]), ranks=(alone,), num_ranks=1)
    finding = find_stall(evidence)
    assert finding.code == "SF106"
    assert "in _sleep" in finding.cause
    assert find_stall(alter(evidence, phase="data_wait")).code == "SF107"
    assert find_stall(alter(evidence, syscall="futex")).code == "SF109"


def test_ranks_that_all_wait_for_data_are_told_from_ranks_that_all_stand_elsewhere() -> None:
    recorded = read_evidence(NAMED["sleeping"])
    together = replace(recorded, ranks=tuple(replace(rank, flight=None) for rank in recorded.ranks))
    waiting = find_stall(alter(together, phase="data_wait"))
    assert waiting.code == "SF107"
    assert waiting.cause.startswith("ranks ")
    assert find_stall(alter(together, phase="forward")).code == "SF110"
    assert find_stall(alter(recorded, phase="data_wait")).cause.startswith("rank "), "others wait in a collective"


def test_evidence_is_the_same_after_it_was_kept(tmp_path: Path) -> None:
    evidence = read_evidence(NAMED["sleeping"])
    assert read_evidence(write_evidence(tmp_path, evidence)) == evidence
    (tmp_path / "broken.json").write_text('{"ranks": 3}')
    with pytest.raises(ValueError, match=r"broken\.json"):
        read_evidence(tmp_path / "broken.json")


def test_a_dump_of_another_form_is_refused() -> None:
    assert read_flight(None) is None
    assert read_flight({"entries": []}) is None
    assert read_flight({"version": "2.10"}) is None
    with pytest.raises(ValueError, match="no dump"):
        read_flight({"entries": [{"is_p2p": False}]})


def test_a_dump_that_cannot_be_read_is_missing_evidence() -> None:
    recorded = read_evidence(NAMED["sleeping"])
    broken = alter(recorded, flight={"entries": [{"is_p2p": False}]}, phase="forward", stacks="", cpu_share=0.0)
    assert "rank 0: no dump" in find_stall(broken).evidence["missing"]


def test_of_ranks_in_different_groups_the_one_that_ran_ahead_is_named() -> None:
    skipped = read_evidence(NAMED["skipped-collective"])
    ahead = next(rank for rank in skipped.ranks if rank.phase == "forward")
    assert find_stall(skipped).evidence["rank"] == ahead.rank
    swapped = replace(skipped, ranks=tuple(replace(rank, rank=1 - rank.rank) for rank in reversed(skipped.ranks)))
    assert find_stall(swapped).evidence["rank"] == 1 - ahead.rank
    assert "rank" not in find_stall(read_evidence(NAMED["other-order"])).evidence


def test_ranks_between_phases_and_unknown_states_do_not_break_the_rules() -> None:
    bare = RankEvidence(0, 7, "idle", False, "", 0, 33.0, 0.0)
    finding = find_stall(StallEvidence(1.0, 33.0, 12.0, (bare,), 1))
    assert finding.code in ("SF106", "SF110")


def test_another_call_under_the_same_number_is_no_matter_of_the_network() -> None:
    """The root of a broadcast is through with it at once, whatever the others call."""
    evidence = read_evidence(NAMED["network-cut"])
    through, stuck = evidence.ranks
    assert find_stall(evidence).code == "SF108"
    waiting, _ = read_flight(stuck.flight).waiting  # type: ignore[union-attr]
    for entry in through.flight["entries"]:
        if entry["process_group"][0] == waiting.group and entry["collective_seq_id"] == waiting.number:
            entry["profiling_name"] = "gloo:all_reduce"
    finding = find_stall(evidence)
    assert finding.code == "SF104"
    assert "all_reduce" in finding.cause


def test_both_recorders_are_dumped_where_torch_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(group: str) -> str:
        one = {"process_group": [group, ""], "collective_seq_id": 3, "is_p2p": False, "retired": False}
        return json.dumps({"version": "2.10", "entries": [{**one, "profiling_name": "x:all_reduce"}]})

    gloo = SimpleNamespace(_dump_fr_trace_json=lambda **_: of("1"))
    both = SimpleNamespace(**vars(gloo), _dump_nccl_trace_json=lambda **_: of("0"))
    same = SimpleNamespace(_dump_fr_trace_json=lambda **_: of("1"), _dump_nccl_trace_json=lambda **_: of("1"))
    cases = ((gloo, ["1"]), (both, ["1", "0"]), (same, ["1", "1 of NCCL"]), (SimpleNamespace(), None))
    for module, groups in cases:
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
        said = evidence_server._dump_flight()["flight"]
        assert (said and [entry["process_group"][0] for entry in said["entries"]]) == groups


def entry(group: str, number: int, call: str, *, retired: bool = False) -> dict[str, object]:
    return {
        "process_group": [group, ""], "collective_seq_id": number, "profiling_name": f"gloo:{call}", "is_p2p": False,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "retired": retired,
    }  # fmt: skip


def rank(number: int, *entries: dict[str, object], **changes: object) -> RankEvidence:
    state = RankEvidence(
        rank=number, process=number + 1, state="sleeping", has_ended=False, phase="forward", step=9, quiet_s=20.0,
        cpu_share=0.0, children=(), waits_for_disk=False, answered=True,
        flight={"entries": list(entries)} if entries else None, syscall="", stacks="",
    )  # fmt: skip
    return replace(state, **changes)  # type: ignore[arg-type]


def stalled(*ranks: RankEvidence) -> StallEvidence:
    return StallEvidence(time_s=1.0, quiet_s=20.0, limit_s=10.0, ranks=ranks, num_ranks=len(ranks), oom_kills=0)


def test_ranks_that_wait_for_one_that_has_ended_are_told_so() -> None:
    waiting = rank(0, entry("0", 5, "all_reduce"))
    finding = find_stall(stalled(waiting, rank(1, has_ended=True), replace(waiting, rank=2)))
    assert (finding.code, finding.evidence["rank"]) == ("SF106", 1)
    assert re.match(r"rank 1 .*ended, in forward of step 9, .*ranks 0, 2 .* all_reduce ", finding.cause)


def test_of_a_rank_that_waits_for_data_the_worker_that_sends_none_is_named() -> None:
    causes = []
    for worker in ("sleeping", "zombie", "stopped", "disk-sleep"):
        finding = find_stall(stalled(rank(0, phase="data_wait", children=("running", worker))))
        assert finding.code == "SF107"
        causes.append(finding.cause.partition(". ")[2])
    assert not causes[0]
    assert len(set(causes)) == len(causes)


def test_a_collective_of_experts_is_one_of_a_layer() -> None:
    travelling = {**entry("4", 7, "all_to_all"), "process_group": ["4", "mesh_ep"]}
    came = {**travelling, "collective_seq_id": 6, "retired": True}
    finding = find_stall(stalled(rank(0, travelling, layer=12), rank(1, came, layer=12)))
    assert (finding.code, finding.evidence["rank"]) == ("SF106", 1)
    assert "step 9, in layer 12," in finding.cause
    experts = rf"number 7 of group 4 \({MEANINGS['mesh_ep']}, tokens travelling .*, layer 12\)"
    assert re.search(experts, finding.cause)
    # With gloo gradients are summed by the same call; of a group of all ranks its phase tells.
    for group in ("mesh_fsdp", "default_pg"):
        sums = {**travelling, "process_group": ["4", group]}
        said = find_stall(stalled(rank(0, sums, layer=12, phase="backward"), rank(1, layer=12))).cause
        assert "tokens travelling" not in said
    everywhere = {**travelling, "process_group": ["4", "default_pg"]}
    said = find_stall(stalled(rank(0, everywhere, layer=12), rank(1, layer=12))).cause
    assert re.search(rf"\({MEANINGS['default_pg']}, tokens travelling .*, layer 12\)", said)


def test_groups_that_share_no_rank_do_not_wait_for_each_other() -> None:
    ranks = [rank(number, entry("1" if number < 2 else "2", 7, "all_to_all")) for number in range(4)]
    finding = find_stall(stalled(*ranks))
    assert finding.code == "SF108"
    assert re.search("groups they share, .*all_to_all", finding.cause)
    both = entry("2", 6, "all_to_all", retired=True)  # one that is in both groups is missed in the other
    ranks[1] = rank(1, both, entry("1", 7, "all_to_all"))
    assert find_stall(stalled(*ranks)).code == "SF105"
    first = (rank(0, entry("1", 1, "all_reduce")), rank(1, entry("2", 1, "all_reduce")))  # both never used before
    assert find_stall(stalled(*first)).code == "SF105"


def test_a_rank_that_saves_beside_waiting_for_another_is_not_blamed() -> None:
    waiting = rank(0, entry("0", 5, "all_reduce"), waits_for_disk=True)
    asleep = rank(1, entry("0", 4, "all_reduce", retired=True))
    finding = find_stall(stalled(waiting, asleep))
    assert (finding.code, finding.evidence["rank"]) == ("SF106", 1)


def test_where_no_rank_answers_none_is_said_to_hold_its_lock() -> None:
    stacks = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in work\n'
    mute = [
        rank(number, answered=False, stacks=stacks, phase=phase) for number, phase in enumerate(("forward", "save"))
    ]
    assert find_stall(stalled(*mute)).code == "SF106"
    assert find_stall(stalled(mute[0], rank(1, entry("0", 5, "all_reduce")))).code == "SF109"
