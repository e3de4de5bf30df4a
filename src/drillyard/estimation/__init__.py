"""Estimates before money is spent: will it fit, how fast, how long, how much, how often will it
fail. Without torch."""
