"""`python -m zcomm.selftest`: the kernels of a device, tested on the machine of a user."""
