"""Engine: the chunk pipeline. A job comes in; its chunks are encoded, sent, summed and decoded.

One thread per engine runs jobs in the order of submission, while backward goes on. `cpu` is the
engine for CPU tensors, `device` the one that only enqueues work on a GPU's streams. `buffers` holds
the memory of chunks in flight.

Imports: transport and below. Start with job.py, then cpu.py.
"""
