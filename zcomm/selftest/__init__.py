"""Self-test: `python -m zcomm.selftest` tests the kernels of one device on the user's machine.

`command` runs the parts: `exactness` and `damage` compare every codec with the reference, `graphs`
replays CUDA graphs, `engine` trains small models, `speed` times the kernels.

Imports: everything but cli and integrations. Start with command.py.
"""
