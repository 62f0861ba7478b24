"""Traces of torch.profiler: real ones, and one made by hand as a GPU's is built."""

import json

from torch.profiler import ProfilerActivity, profile, schedule


def record(path, step, steps):
    """Run `steps` under the profiler, marked as steps, and write the trace."""
    step()
    marks = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=marks) as recorded:
        for _ in range(steps + 1):
            step()
            recorded.step()
    recorded.export_chrome_trace(str(path))
    return path


def events(path):
    """The events of a trace, as they were written."""
    return json.loads(path.read_text())["traceEvents"]


def event(cat, name, ts, dur, tid=1, **args):
    """A complete event."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def on_gpu(ts=0.0):
    """One pass of two stages on a GPU, made by hand: host times are short, kernels are late.

    Stage 0 computes 100 + 50 us (the second kernel launched by no operation) and stage 1 200 us
    forward; backward 400 us of stage 1, then 150 + 30 us of stage 0, where 30 us accumulate.
    """
    number = int(ts)
    forward, backward = 1, 2

    def kernel(start, dur, at, name="gemm"):
        # the operation is named too, but the launch is nearer
        args = {"correlation": number + at, "External id": number}
        return event("kernel", name, ts + start, dur, 7, device=0, **args)

    def launch(start, at, thread, cat="cuda_runtime"):
        return event(cat, "cudaLaunchKernel", ts + start, 1, thread, correlation=number + at)

    def op(name, start, dur, thread, sequence, external=0):
        args = {"Sequence number": number + sequence, "External id": number + external}
        return event("cpu_op", name, ts + start, dur, thread, **args)

    evaluate = "autograd::engine::evaluate_function: "
    return [
        event("user_annotation", "PP:0F0", ts + 0, 20),
        op("aten::linear", 2, 8, forward, 1),
        op("aten::addmm", 3, 6, forward, 2),
        launch(4, 1, forward),
        launch(15, 2, forward, "cuda_driver"),  # between operations
        event("user_annotation", "PP:1F0", ts + 22, 10),
        op("aten::gelu", 23, 5, forward, 3, external=90),
        event("user_annotation", "PP:1B0", ts + 39, 6.5, backward),
        op(evaluate + "GeluBackward0", 40, 5, backward, 3),
        launch(41, 4, backward),
        event("user_annotation", "PP:0B0", ts + 46, 10, backward),
        op(evaluate + "AddmmBackward0", 46, 5, backward, 2),
        launch(47, 5, backward),
        op(evaluate + "torch::autograd::AccumulateGrad", 52, 3, backward, -1),
        launch(53, 6, backward),
        launch(54, 7, backward),
        event("user_annotation", "Optimizer.step#AdamW.step", ts + 60, 10),
        op("aten::_foreach_add_", 61, 5, forward, 9),
        launch(62, 8, forward),
        kernel(300, 100, 1),
        kernel(400, 50, 2, "triton_add"),
        # its launch was not recorded
        event("kernel", "gelu", ts + 450, 200, 7, **{"External id": number + 90}),
        kernel(650, 400, 4),
        kernel(1050, 150, 5),
        kernel(1200, 30, 6),
        kernel(1200, 5000, 7, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        kernel(1300, 70, 8, "adam"),
    ]


def write(path, found, **fields):
    """A trace of these events."""
    path.write_text(json.dumps({"schemaVersion": 1, **fields, "traceEvents": found}))
    return path
