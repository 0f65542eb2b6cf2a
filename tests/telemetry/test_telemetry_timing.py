import gzip
import json
import subprocess
import sys

import pytest
import torch

import telemetry_examples as examples
from armillary.telemetry.config import Telemetry
from armillary.telemetry.events import EventLog, read_events
from armillary.telemetry.machine.host import peak_resident_bytes
from armillary.telemetry.memory import peak_memory_bytes
from armillary.telemetry.memory_snapshot import start_memory_history
from armillary.telemetry.profiler import StepProfiler
from armillary.telemetry.timing import StepTimer


def test_the_phases_of_a_step_sum_to_it_and_the_next_starts_from_nothing():
    clock = examples.Ticks(0.0)
    timer = StepTimer(torch.device("cpu"), clock=clock)
    for name, seconds in (
        ("data", 0.25),
        ("forward_backward", 2.0),
        ("data", 0.5),
        ("forward_backward", 1.0),
        ("optimizer", 0.125),
    ):
        with timer.phase(name):
            clock.now += seconds
        clock.now += 0.0625
    taken = timer.end().seconds()
    assert taken.fields() == {
        "step_seconds": 4.1875,
        "data_seconds": 0.75,
        "forward_backward_seconds": 3.0,
        "optimizer_seconds": 0.125,
        "checkpoint_seconds": 0.0,
        "other_seconds": 0.3125,
    }
    clock.now += 5.0
    timer.restart()
    with timer.phase("checkpoint"):
        clock.now += 1.0
    assert timer.end().seconds().fields()["checkpoint_seconds"] == 1.0
    assert timer.end().seconds().step == 0.0


def test_a_phase_that_raises_is_ended_and_phases_do_not_nest():
    clock = examples.Ticks(0.0)
    timer = StepTimer(clock=clock)
    with pytest.raises(KeyError), timer.phase("data"):
        clock.now += 1.0
        raise KeyError
    nested = pytest.raises(AssertionError, match="inside phase optimizer")
    with timer.phase("optimizer"), nested, timer.phase("data"):
        pass
    with pytest.raises(AssertionError, match="no such phase"), timer.phase("lunch"):
        pass
    assert timer.end().seconds().data == 1.0


def test_peak_memory_counts_what_was_held_and_given_back():
    code = (  # a small process of its own: this one's peak may be long past
        "from armillary.telemetry.machine.host import peak_resident_bytes\n"
        "before = peak_resident_bytes()\n"
        "held = b'x' * (64 << 20)\n"
        "del held\n"
        "print(before, peak_resident_bytes())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    before, after = map(int, made.stdout.split())
    assert before < 64 << 20 <= after - before + (1 << 20)
    peak_here = peak_resident_bytes()
    assert peak_memory_bytes(torch.device("cpu")) >= peak_here > before


def profiled(tmp_path, telemetry, steps, rank=0):
    with EventLog(tmp_path / "events.jsonl") as log:
        profiler = StepProfiler(telemetry, tmp_path, log, rank)
        for step in steps:
            profiler.before_step(step)
            with torch.profiler.record_function(f"the step {step}"):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            profiler.after_step(step)
        profiler.close()
    found = sorted((tmp_path / "profile").glob("*")) if (tmp_path / "profile").exists() else []
    return found, list(read_events(tmp_path / "events.jsonl"))


@pytest.mark.parametrize("steps", [range(1, 8), range(4, 8)], ids=["from the start", "resumed"])
def test_the_chosen_steps_and_no_others_are_in_the_trace(tmp_path, steps):
    telemetry = Telemetry(profile_from=4, profile_steps=2)
    (trace,), (event,) = profiled(tmp_path, telemetry, steps)
    content = json.loads(gzip.decompress(trace.read_bytes()))
    names = {each.get("name") for each in content["traceEvents"]}
    seen = {name for name in names if name and name.startswith("the step")}
    assert seen == {"the step 4", "the step 5"}
    assert "aten::mm" in names
    assert (event["kind"], event["path"]) == ("profile", str(trace))
    assert (event["first_step"], event["last_step"]) == (4, 5)


def test_a_run_that_ends_while_profiled_still_leaves_its_trace(tmp_path):
    telemetry = Telemetry(profile_from=2, profile_steps=50)
    (trace,), (event,) = profiled(tmp_path, telemetry, range(1, 5))
    assert "the step 4" in gzip.decompress(trace.read_bytes()).decode()
    assert (event["step"], event["first_step"], event["last_step"]) == (4, 2, 4)
    assert trace.name == "trace-steps-2-4-rank0.json.gz"


def test_a_run_that_ends_before_the_first_wanted_step_leaves_no_trace(tmp_path):
    assert profiled(tmp_path, Telemetry(profile_from=5), range(1, 5)) == ([], [])


@pytest.mark.parametrize(
    ("telemetry", "rank"),
    [(Telemetry(), 0), (Telemetry(profile_from=2), 1), (Telemetry(profile_from=99), 0)],
)
def test_nothing_is_profiled_unasked(tmp_path, telemetry, rank):
    assert profiled(tmp_path, telemetry, range(1, 5), rank) == ([], [])


def test_every_rank_is_profiled_when_asked(tmp_path):
    telemetry = Telemetry(profile_from=2, profile_steps=1, profile_all_ranks=True)
    (trace,), _ = profiled(tmp_path, telemetry, range(1, 5), rank=3)
    assert trace.name == "trace-steps-2-2-rank3.json.gz"


def test_the_allocator_recorder_of_this_torch_has_the_private_names_that_are_used():
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)
    if not torch.cuda.is_available():
        assert start_memory_history() is False
