"""Engine: the chunk pipeline. A job comes in; its chunks are encoded, sent, summed and decoded.

`engine` has the thread that runs jobs in the order of submission, while backward continues. A
runner decides the order of their chunks: `host` where all ranks share memory, `cpu` where they do
not, `device`, which only enqueues work on a GPU's streams. `pipeline` says what happens to a chunk,
and `buffers` holds its bytes; `plain` runs uncompressed jobs in shared memory without either.
`compressor` and `handle` are what the models of DDP and FSDP2 have in common.
`tuning` knows how long all of it takes: the cost model, and what codec="auto" measures and chooses.
The pipeline does not import it.

Imports: transport and below. Start with pipeline.py, then engine.py.
"""
