"""ZeRO stage 1: `zcomm.ZeroOptimizer`, an optimizer whose state is sharded over the ranks.

`optimizer` is the torch.optim.Optimizer; `shards` holds this rank's runs of parameters and
gradients; `parameter_gather` brings updated parameters back to all ranks; `state`,
`consolidate` and `torch_format` save and load. A new optimizer wrapper goes here.

Imports: ddp and below. Start with optimizer.py.
"""
