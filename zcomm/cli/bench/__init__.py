"""`zcomm bench`: bandwidth of the collectives, every row checked; `--fit` makes a profile."""
