"""What can be said of GPU code without a GPU: its machine code, its bytes, a predicted time."""
