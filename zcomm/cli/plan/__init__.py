"""`zcomm plan`: estimates the memory and time of a training run."""
