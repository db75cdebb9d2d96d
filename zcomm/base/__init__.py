"""Base: what every other package may use, and what needs nothing but torch.

`arguments` checks what a caller passed: every message says what was expected, what came, and the
remedy. `host` says what a host is, and `launcher` what a launcher's variables say about hosts.
`cupy_arrays` lets CuPy arrays stand in for tensors.

Imports: torch. Start with arguments.py.
"""
