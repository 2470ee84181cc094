"""CUDA devices that are not there: tensors say `cuda:0` and their numbers lie in CPU memory.

    with pretended(2) as machine:
        model = load_random(name, config, device="cuda:1")
        with machine.counting() as counts:
            …
    print(counts.launches, counts.waits, counts.lines("wait"))

`tests` run methods and tasks on them, `benchmarks/launches.py` counts there. What a real device refuses is refused:
operands on two devices, a Triton kernel on a device that is not the current one, an event's time before it was waited
for. A copy to pinned memory arrives when somebody waits for it, and until then there is rubbish in its place. Pinned
memory that a copy reads is written to by nobody else before it is done, or by a kernel behind it.

Not here: times, dtypes that an op lacks on CUDA, races between streams over memory of a device, rounding of tensor
cores.
"""
