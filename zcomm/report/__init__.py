"""Report: how the command shows results: tables, plots, pages, progress, units.

Nothing here knows what is measured. `finding` is one line of a check-up, `machine` says where
figures come from.

Imports: nothing of zcomm but its version. Start with table.py.
"""
