"""Wire: the bytes that travel between ranks. docs/wire-format.md is the specification.

`header` has the frame header, the checksum and WireError; `segments` places segments in frames;
`lm_tables` has the generated tables of the lm codecs.

Imports: base. Start with header.py.
"""
