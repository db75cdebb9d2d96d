"""`zcomm bench`: times and checks collectives; `--fit` writes a profile of the machine."""
