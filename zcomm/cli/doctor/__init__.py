"""`zcomm doctor`: is everything here that zcomm needs, and does it work?"""
