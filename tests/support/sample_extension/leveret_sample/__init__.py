"""Extends the broker in every way there is, each in a few lines."""
