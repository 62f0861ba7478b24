"""A run that is meant for GPUs goes to GPUs, whatever starts it, or ends with an error."""

import os

import pytest
import torch

from partopt.errors import PartoptError
from partopt.runtime import processes
from partopt.runtime.context import Context
from partopt.runtime.link_measurement import prepare_links
from partopt.runtime.processes import choose_backend, run_here
from tests.gpu.device import FakeDevice, installed

LAUNCHED = {"RANK": 5, "WORLD_SIZE": 32, "MASTER_ADDR": "h", "MASTER_PORT": 1}
TORCHRUN = LAUNCHED | {"LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8, "TORCHELASTIC_RUN_ID": "x"}
SRUN = LAUNCHED | {"SLURM_LOCALID": 5, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}


@pytest.fixture
def start(monkeypatch):
    """Lets this process be a rank with these variables that sees so many GPUs."""
    monkeypatch.setattr(processes.dist, "is_nccl_available", lambda: True)

    def begin(devices, variables=()):
        monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: devices)
        for name in {*TORCHRUN, *SRUN, "CUDA_VISIBLE_DEVICES"}:
            monkeypatch.delenv(name, raising=False)
        for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
            monkeypatch.setenv(name, "")  # what a test sets is gone behind it
            monkeypatch.delenv(name)
        for name, value in dict(variables).items():
            monkeypatch.setenv(name, str(value))

    return begin


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
@pytest.mark.parametrize(("devices", "device"), [(8, 5), (1, 0)])
def test_under_a_launcher_a_rank_takes_its_gpu_of_those_it_sees(start, variables, devices, device):
    start(devices, variables)
    if devices == 1 and variables is TORCHRUN:  # which shows all GPUs to all ranks
        with pytest.raises(PartoptError, match="rank 5 of this host has no GPU: torch sees 1"):
            choose_backend("auto", 8)
        return
    assert choose_backend("auto", 32) == choose_backend("nccl", 32) == "nccl"
    assert processes.local_device(devices) == device


def test_a_rank_of_torchrun_that_is_shown_one_gpu_takes_it(start):
    start(1, TORCHRUN | {"CUDA_VISIBLE_DEVICES": "5"})
    assert choose_backend("auto", 8) == "nccl"
    assert processes.local_device(1) == 0


def test_two_ranks_on_one_gpu_are_told_what_to_do(start, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError(
            "NCCL error in: init.cpp, invalid usage\nDuplicate GPU detected : rank 1 and rank 0 "
            "both on CUDA device 1b000"
        )

    start(1, TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(processes.dist, "init_process_group", refuse)
    monkeypatch.setattr(processes, "_die_with_parent", lambda _: None)
    with installed(FakeDevice()), pytest.raises(PartoptError, match="have one GPU") as raised:
        run_here(lambda context: context, "nccl")
    assert "CUDA_VISIBLE_DEVICES" in raised.value.hint


def test_a_rank_whose_device_fails_is_told_where_to_look():
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    failure = processes.Failure.of(1, error)
    assert "an index that lies outside of a table" in failure.hint
    assert "CUDA_LAUNCH_BLOCKING" not in failure.hint


def test_the_ranks_of_a_host_are_those_that_srun_says(start):
    start(8, SRUN)
    run = prepare_links()
    assert (run.ranks, run.per_server, run.backend) == (32, 8, "nccl")


@pytest.mark.parametrize(
    ("devices", "variables", "name", "expected"),
    [
        (4, TORCHRUN, "auto", "rank 5 of this host has no GPU: torch sees 4"),
        (8, LAUNCHED, "auto", "LOCAL_RANK is not set, and torch sees 8 GPUs"),
        (2, {}, "auto", "`backend=auto`: 4 ranks need a GPU each, torch sees 2"),
        (2, {}, "nccl", "`backend=nccl`: 4 ranks need a GPU each, torch sees 2"),
        (2, {}, "mpi", "`backend=mpi`: unknown backend"),
    ],
)
def test_what_cannot_be_taken_is_an_error_and_never_a_run_on_processors(
    start, devices, variables, name, expected
):
    start(devices, variables)
    with pytest.raises(PartoptError, match=expected) as raised:
        choose_backend(name, 4)
    assert "gloo" in raised.value.hint
    if name != "mpi":
        assert choose_backend("gloo", 4) == "gloo"


def test_without_gpus_processors_are_taken(start):
    start(0, TORCHRUN)
    assert choose_backend("auto", 8) == "gloo"


def test_a_group_of_nccl_is_bound_to_the_gpu_of_its_rank(start, monkeypatch):
    start(8, TORCHRUN)
    given = {}
    monkeypatch.setattr(
        processes.dist, "init_process_group", lambda *a, **options: given.update(options)
    )
    monkeypatch.setattr(processes, "_run_in_group", lambda main, context: main(context))
    monkeypatch.setattr(processes, "_die_with_parent", lambda _: None)
    device = FakeDevice(devices=8)
    with installed(device):
        context: Context = run_here(lambda context: context, "nccl")
    assert given["device_id"] == context.device == torch.device("cuda", 5)
    assert (context.backend, device.number) == ("nccl", 5)
    # before CUDA begins: every kernel is loaded at once, and no two streams share a queue
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    run_here(lambda context: context, "gloo")
    assert given["device_id"] is None
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with installed(device):
        run_here(lambda context: context, "nccl")
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize("given", ["", "0", "33", "many"])
def test_a_number_of_queues_that_is_none_is_an_error(start, monkeypatch, given):
    start(2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    with pytest.raises(PartoptError, match=f'CUDA_DEVICE_MAX_CONNECTIONS="{given}"') as raised:
        choose_backend("auto", 2)
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in raised.value.hint
    assert choose_backend("gloo", 2) == "gloo"
    start(0)
    assert choose_backend("auto", 2) == "gloo"
