"""DDP: `zcomm.compress` and the comm hook behind it.

`hook` has both; the hook takes a bucket and returns a future. `compressor` runs the steps of one
model: buckets in, jobs out, failures raised where the user sees them. `buckets` plans how each
bucket travels.

Imports: engine and below. Start with hook.py, then compressor.py.
"""
