"""Facts about GPU code that need no GPU: its machine code, the bytes it moves, a predicted time."""
