"""Conformance: does this installation do what the specification says?

`contract` has the inputs of the numerics contract and compares results bit by bit; `vectors` are
checked-in inputs and wires; `gpu_tools` finds out which GPUs the kernels can use. Tests,
`zcomm doctor` and `python -m zcomm.selftest` share them.

Imports: codecs, report and below. Start with contract.py.
"""
