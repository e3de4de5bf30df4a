"""Predictions before money is spent: will it fit, how fast, how long, how much, how often will it fail.

Every answer is made of terms that carry formula and sources. Nothing here imports torch.
"""
