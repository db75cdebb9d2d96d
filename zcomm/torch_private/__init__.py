"""Every private corner of torch that zcomm touches, one module per corner.

A private name of torch appears here and nowhere else. When a release of torch renames one, this is
the only package that changes.

Imports: torch. Start with autograd.py, the smallest.
"""
