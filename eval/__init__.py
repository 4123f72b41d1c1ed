"""Evaluation: what a compressed model lost, what it gained, and one report of both."""
