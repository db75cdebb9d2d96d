"""Report: how commands talk to people: tables, plots, HTML pages, progress, units, usage errors.

Nothing here knows what is measured. `finding` is the result of one check; `usage` has what every
command line needs.

Imports: nothing else from zcomm. Start with table.py.
"""
