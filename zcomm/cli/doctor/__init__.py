"""`zcomm doctor`: checks that this machine has what zcomm needs, and that it works."""
