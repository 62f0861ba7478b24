"""Bytes of tensors, counted while they live, and what plans predict of them."""

import threading

import pytest
import torch

from partopt.profiler.step import run_loss
from partopt.report.run_text import render
from partopt.runtime.tensor_memory import COUNTED, FEWEST, TensorMemory
from tests.profiler import witnesses
from tests.profiler.helpers import example
from tests.runtime.launched import outcome_of

NEAR = 0.08  # of what was counted: gradients are not all there when activations are at their most


def test_what_lives_at_once_counts_and_views_and_meta_tensors_do_not():
    held = torch.zeros(100)
    with TensorMemory([held, held[:10], torch.zeros(10**6, device="meta")]) as memory:
        assert memory.peak_bytes == 400
        a = torch.zeros(1000)
        b = a.view(10, 100)[0] + 1
        del a
        assert (memory.live_bytes, memory.peak_bytes) == (800, 4800)
        c = held * 2
        assert memory.peak_bytes == 4800
        parting = threading.Thread(target=lambda given: given.clear(), args=([b],))
        del b
        parting.start()
        parting.join()
        del parting
    assert memory.live_bytes == 400 + c.nbytes


def test_a_step_takes_what_torchs_own_tracker_finds():
    source = example("gpt", layers=2, width=32, heads=2, context=32, vocabulary=100)
    model, inputs = source.build(), source.example_inputs(2)
    expected = witnesses.peak_bytes(model, inputs, source.loss_fn)  # leaves gradients behind
    held = [*model.parameters(), *(each.grad for each in model.parameters()), inputs]
    buffers = sum(each.nbytes for each in model.buffers())
    with TensorMemory(held) as memory:
        run_loss(model, inputs, source.loss_fn).backward()
    assert memory.peak_bytes - buffers == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_plans_predict_what_runs_count(tmp_path_factory):
    """Parameters, gradients, the optimizer's state, activations, buffers and transients."""
    runs = outcome_of("tests.runtime.memory_runs", tmp_path_factory)
    for (schedule, engine), run in runs.items():
        for rank in run.ranks:
            predicted, counted = rank.predicted.peak_memory_bytes, rank.measured.peak_memory_bytes
            assert predicted == pytest.approx(counted, rel=NEAR), (schedule, engine, rank.rank)
        assert (run.steps, run.counted_step) == (FEWEST, COUNTED)
        assert run.measured_s in run.steps_s[COUNTED + 1 :]
        page = render(run)
        assert "peak memory, rank " in page
        assert max(len(line) for line in page.splitlines()) <= 80
