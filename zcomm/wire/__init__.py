"""Wire: what travels, byte by byte. docs/wire-format.md is the specification.

`header` has the frame header, the checksum and WireError; `segments` says where each segment lies
in a frame; `lm_tables` has the generated tables of the lm codecs.

Imports: base. Start with header.py.
"""
