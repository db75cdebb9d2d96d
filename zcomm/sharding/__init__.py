"""Sharding: who owns what, and how a flat tensor is cut for its trip. Mostly pure arithmetic.

`owners` cuts parameters into one run per rank; `chunks` cuts runs into the pieces that travel
together; `hierarchy` says which ranks share a host. `residual_store` keeps residuals by parameter.
`settings` is the one class of user settings. `checkpoint_tensors` presents shards to
torch.distributed.checkpoint.

Imports: codecs and below. Start with owners.py, then chunks.py.
"""
